"""A transfer engine in a process of its own, over a pool that the test sees, too.

    python -m support.transfer_child BACKEND EPOCH MEMORY PAGE PAGES

``MEMORY``: a descriptor of the pool. Commands come by stdin, a hex message a line; events go to stdout the same way.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path
from queue import Queue

import msgspec
import numpy as np

from pdserve.disaggregation.transfer.engine import TransferEngine
from pdserve.mem_cache.kv_pages.page_group import PageGroup
from pdserve.mem_cache.kv_pages.region import KVRegion, allocate_region
from pdserve.messages.channel import encode
from pdserve.messages.worker import TransferCommand, TransferEvent
from support.machine import limit
from support.staged_pools import direct_group

TESTS = Path(__file__).parents[1]
COMMANDS: msgspec.msgpack.Decoder[list[TransferCommand]] = msgspec.msgpack.Decoder(list[TransferCommand])
EVENTS: msgspec.msgpack.Decoder[list[TransferEvent]] = msgspec.msgpack.Decoder(list[TransferEvent])


class Child:
    """The test's end. ``pool``: [pages, page] bytes."""

    def __init__(self, backend: str, epoch: str, *, page: int, pages: int, env: dict[str, str] | None = None) -> None:
        region = allocate_region(page * pages, shared=True)
        self.pool = np.frombuffer(region.buffer, np.uint8).reshape(pages, page)
        self.epoch = epoch
        command = [sys.executable, "-m", __name__, backend, epoch, str(region.fd), str(page), str(pages)]
        # Not where NVIDIA's driver is looked for by others.
        found_first = [str(TESTS / "support" / "fake_cuda")] if backend == "cuda_ipc" else []
        python_path = os.pathsep.join([*found_first, str(TESTS), str(TESTS.parent / ".ns")])
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[region.fd],
            env={**os.environ, **(env or {}), "PYTHONPATH": python_path},
        )
        os.close(region.fd)
        self._heard: Queue[str] = Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.metadata = bytes.fromhex(self._heard.get(timeout=limit(30.0)))

    def submit(self, *commands: TransferCommand) -> None:
        """Have it obeyed."""
        assert self.process.stdin is not None
        self.process.stdin.write("".join(encode([command]).hex() + "\n" for command in commands))
        self.process.stdin.flush()

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
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._heard.put(line)


def main() -> None:
    backend, epoch, fd, page, pages = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
    # Libraries print what they like; the test reads what we write.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
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
