"""Imported by every Python process of a prefill that has this folder in its path: writes that go wrong, on wish.

Behind the transfer engine, and before the backend, whichever that is: what the engine asked for is told to the
scheduler and summed up as it should have been, what the library is given is something else. The file that
``PDSERVE_CHAOS_WRITES`` names says what, as one word (``MODES``); an empty one: nothing.
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
    """A transfer backend whose writes go wrong; everything else is the backend's own."""

    def __init__(self, backend, told: Path) -> None:
        self._backend = backend
        self._told = told
        self._second: dict[int, tuple] = {}
        """Handles by id, each with another one that must have landed too, and the time until which it is held."""

    def __getattr__(self, name: str):
        return getattr(self._backend, name)

    def write(self, pages):
        """One page is another one, everything is written twice, or later than is said."""
        mode = self._told.read_text()
        if mode:
            self._told.with_suffix(".made").touch()
        if mode == "another page":
            src = pages.src.copy()
            src[-1] = src[-1] - 1 if src[-1] > 1 else src[-1] + 1
            pages = pages._replace(src=src)
        handle = self._backend.write(pages)
        if mode == "twice":
            self._second[id(handle)] = (handle, self._backend.write(pages), 0.0)
        elif mode == "told late":
            self._second[id(handle)] = (handle, handle, time.monotonic() + HELD_SECONDS)
        return handle

    def poll(self, handle):
        """What was written twice has landed twice; what is told late is told late."""
        state = self._backend.poll(handle)
        pair = self._second.get(id(handle))
        if pair is None:
            return state
        _, second, until = pair
        pending, done = type(state).PENDING, type(state).DONE
        # What has failed is told at once: its link is down.
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
