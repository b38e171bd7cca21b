"""Makes writes of a prefill go wrong on demand. Every Python process with this folder in its path imports this file.

It stands between the transfer engine and the backend. The engine reports and sums up the right writes, and the library
gets other ones. The file that ``PDSERVE_CHAOS_WRITES`` names has the kind of mistake as one word (``MODES``); an empty
one means none.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import time
from pathlib import Path

ENGINE = "pdserve.disaggregation.transfer.engine"
OUTGOING = "pdserve.disaggregation.transfer.outgoing_pages"
HELD_SECONDS = 0.3


class Faulty:
    """A transfer backend with writes that go wrong; everything else is the backend's own."""

    def __init__(self, backend, mode_file: Path) -> None:
        self._backend = backend
        self._mode_file = mode_file
        self._second: dict[int, tuple] = {}
        """Handles by id, each with another one that must have landed too, and the time until which it is held."""

    def __getattr__(self, name: str):
        return getattr(self._backend, name)

    def write(self, pages):
        """Write a wrong page, write everything twice, or report the write too late."""
        mode = self._mode_file.read_text()
        if mode:
            self._mode_file.with_suffix(".made").touch()
        if mode == "another page":
            src = pages.src.copy()
            src[-1] = src[-1] - 1 if src[-1] > 1 else src[-1] + 1
            pages = pages._replace(src=src)
        handle = self._backend.write(pages)
        if mode == "twice":
            self._second[id(handle)] = (handle, self._backend.write(pages), 0.0)
        elif mode == "reported late":
            self._second[id(handle)] = (handle, handle, time.monotonic() + HELD_SECONDS)
        return handle

    def poll(self, handle):
        """Return the state of a write.

        One written twice is done when both are; one reported late is pending until then.
        """
        state = self._backend.poll(handle)
        pair = self._second.get(id(handle))
        if pair is None:
            return state
        _, second, until = pair
        pending, done = type(state).PENDING, type(state).DONE
        # What has failed is mode_file at once: its link is down.
        if state is pending or (state is done and (self._backend.poll(second) is pending or time.monotonic() < until)):
            return pending
        del self._second[id(handle)]
        return state

    def progress(self, timeout):
        """Come back while something is held."""
        held = bool(self._second)
        return self._backend.progress(0.01 if held and (timeout is None or timeout > 0.01) else timeout)


class Finder(importlib.abc.MetaPathFinder):
    """Finds the engine's module, once, and puts ``Faulty`` before what it makes."""

    def find_spec(self, name, path, target=None):
        """See ``MetaPathFinder``."""
        if name != ENGINE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module) -> None:
            run(module)
            # Small as the model is, its pages leave by layers.
            importlib.import_module(OUTGOING).MIN_AHEAD_BYTES = 1
            make = module.make_backend
            module.make_backend = lambda *args: Faulty(make(*args), Path(os.environ["PDSERVE_CHAOS_WRITES"]))

        spec.loader.exec_module = exec_module
        return spec


if "PDSERVE_CHAOS_WRITES" in os.environ:
    sys.meta_path.insert(0, Finder())
