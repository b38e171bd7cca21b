"""A transfer engine in a process of its own, over a pool that the test sees, too.

    python -m support.transfer_child BACKEND EPOCH MEMORY PAGE PAGES EVENTS

``MEMORY``: a descriptor of the pool. Commands come by stdin, a hex message a line; events go to the descriptor
``EVENTS`` the same way.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path
from queue import Queue
from typing import Any

import msgspec
import numpy as np

from pdserve.disaggregation.transfer.engine import TransferEngine
from pdserve.mem_cache.kv_pages.page_group import PageGroup
from pdserve.mem_cache.kv_pages.region import KVRegion, allocate_region
from pdserve.messages.channel import encode
from pdserve.messages.worker import TransferCommand, TransferEvent
from support.machine import limit
from support.staged_pools import direct_group

MEMORY_FD, EVENTS_FD = 3, 4
"""Descriptors of a forked process."""
TESTS = Path(__file__).parents[1]
COMMANDS: msgspec.msgpack.Decoder[list[TransferCommand]] = msgspec.msgpack.Decoder(list[TransferCommand])
EVENTS: msgspec.msgpack.Decoder[list[TransferEvent]] = msgspec.msgpack.Decoder(list[TransferEvent])


class Child:
    """The test's end. ``pool``: [pages, page] bytes."""

    def __init__(self, backend: str, epoch: str, *, page: int, pages: int, env: dict[str, str] | None = None) -> None:
        region = allocate_region(page * pages, shared=True)
        self.pool = np.frombuffer(region.buffer, np.uint8).reshape(pages, page)
        # The process that runs ``main`` needs nothing of this.
        from support.forked import forks
        from support.surroundings import is_unchanged

        self.epoch = epoch
        (stdin, commands), (events, output) = os.pipe(), os.pipe()
        self._commands, self._events = os.fdopen(commands, "w"), os.fdopen(events)
        arguments = [backend, epoch, str(MEMORY_FD), str(page), str(pages), str(EVENTS_FD)]
        self.process: Any
        if backend != "cuda_ipc" and env is None and is_unchanged(None):
            given = {MEMORY_FD: region.fd, EVENTS_FD: output}
            self.process = forks().start(__name__, arguments, sys.__stderr__.fileno(), stdin, given)
        else:
            arguments[2], arguments[5] = str(region.fd), str(output)
            # Not where NVIDIA's driver is looked for by others.
            found_first = [str(TESTS / "support" / "fake_cuda")] if backend == "cuda_ipc" else []
            python_path = os.pathsep.join([*found_first, str(TESTS), str(TESTS.parent / ".ns")])
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, *arguments],
                stdin=stdin,
                pass_fds=[region.fd, output],
                env={**os.environ, **(env or {}), "PYTHONPATH": python_path},
            )
        for descriptor in (region.fd, stdin, output):
            os.close(descriptor)
        self._heard: Queue[str] = Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.metadata = bytes.fromhex(self._heard.get(timeout=limit(30.0)))

    def submit(self, *commands: TransferCommand) -> None:
        """Have it obeyed."""
        self._commands.write("".join(encode([command]).hex() + "\n" for command in commands))
        self._commands.flush()

    def next(self, seconds: float = 20.0) -> TransferEvent:
        """Return the next event of the child."""
        [event] = EVENTS.decode(bytes.fromhex(self._heard.get(timeout=limit(seconds))))
        return event

    def is_quiet(self) -> bool:
        """Return whether there is no event that the test has not read."""
        return self._heard.empty()

    def close(self) -> None:
        """End it, however it is."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        self._commands.close()
        self._events.close()

    def _read(self) -> None:
        for line in self._events:
            self._heard.put(line)


def main() -> None:
    backend, epoch, fd, page, pages, events = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
    # Libraries print what they like; the test reads what we write.
    out = os.fdopen(events, "w")
    region = KVRegion(mmap.mmap(fd, page * pages), page * pages, fd)

    def emit(event: TransferEvent) -> None:
        print(encode([event]).hex(), file=out, flush=True)

    group = PageGroup(region, page)
    if backend == "cuda_ipc":
        group = direct_group(np.frombuffer(region.buffer, np.uint8).reshape(pages, page))
    engine = TransferEngine(backend, [group], epoch, "127.0.0.1", emit).start()
    print(engine.metadata.hex(), file=out, flush=True)
    for line in sys.stdin:
        [command] = COMMANDS.decode(bytes.fromhex(line))
        engine.submit(command)


if __name__ == "__main__":
    main()
