"""One side of a transfer, in a process of its own.

    python -m pdserve.benchmark.transfer.child PARENT CONNECTION SOURCE DESTINATION

The process to die with, and three descriptors: where commands come and answers go, and the pools.
"""

from __future__ import annotations

from ...runtime import clean_start  # isort: skip  # noqa: F401

import mmap
import os
import sys
import time
from multiprocessing.connection import Connection
from typing import NamedTuple

from ...disaggregation.errors import BackendUnavailable
from ...mem_cache.kv_pages.region import KVRegion
from ...messages.base import unpack_i32
from ...runtime.child import die_with_parent
from .messages import (
    COMMANDS,
    Answer,
    Begin,
    Begun,
    Command,
    Connect,
    Done,
    Failed,
    Grant,
    How,
    Move,
    Moved,
    NotInstalled,
    Role,
    Verified,
    Verify,
    encode,
)
from .sides import Owner, Pools, Side, SideFailed, Writer


class Descriptors(NamedTuple):
    """File descriptors of the two pools."""

    source: int
    destination: int


def make_side(begin: Begin, files: Descriptors) -> Side:
    """Make the side, writer or owner of the destination, that ``begin`` describes.

    ``files``: memory files of the source and the destination pool, which are mapped. Raises ``BackendUnavailable``, and
    errors of the library.
    """
    nbytes = begin.page_bytes * begin.num_pages
    source, destination = (KVRegion(mmap.mmap(fd, nbytes), nbytes, fd) for fd in files)
    pools = Pools(source, destination, begin.page_bytes, begin.num_pages)
    is_owner = begin.role is Role.OWNER
    if begin.how is How.ENGINE:
        from .engine_sides import EngineOwner, EngineWriter

        return EngineOwner(begin.backend, pools) if is_owner else EngineWriter(begin.backend, pools)
    if begin.how is How.MEMCPY:
        from .memcpy import MemcpyWriter

        return MemcpyWriter(pools)
    if begin.backend == "nixl":
        from .raw_nixl import NixlOwner, NixlWriter

        return NixlOwner(pools) if is_owner else NixlWriter(pools)
    from .raw_mooncake import MooncakeOwner, MooncakeWriter

    return MooncakeOwner(pools) if is_owner else MooncakeWriter(pools)


def obey(side: Side, command: Command) -> Answer:
    """Execute ``command`` on ``side``, one end of the measured transfer, and return the answer.

    Raises ``SideFailed``, also for a command that is meant for the other end.
    Errors of the side's transfer library (NIXL, Mooncake) pass through.
    """
    match side, command:
        case Writer(), Connect():
            side.connect(command.means)
            return Done()
        case Writer(), Move():
            return move(side, command)
        case Owner(), Grant():
            side.grant(unpack_i32(command.pages))
            return Done()
        case _, Verify():
            return verify(side, command)
        case _:
            raise SideFailed(f"{type(command).__name__} is not for this side")


def move(side: Writer, command: Move) -> Moved:
    """Move the pages of ``command`` again and again for its ``seconds``, at least once.

    Return the seconds of each time, and the checksums of the last one.
    """
    src, dst, until = unpack_i32(command.src), unpack_i32(command.dst), time.perf_counter() + command.seconds
    times: list[float] = []
    while not times or time.perf_counter() < until:
        moving = side.move(src, dst, hashed=command.hashed)
        times.append(moving.seconds)
    return Moved(times, moving.slices)


def verify(side: Side, command: Verify) -> Verified:
    """Verify the checksums of ``command`` again and again for its ``seconds``, at least once.

    Return the seconds of each time.
    """
    pages, until = unpack_i32(command.pages), time.perf_counter() + command.seconds
    times: list[float] = []
    while not times or time.perf_counter() < until:
        times.append(side.verify(pages, command.slices))
    return Verified(times)


def serve(connection: Connection, files: Descriptors) -> None:
    """Execute every command that comes and send its answer; errors are answers, too. Ends by ``EOFError``.

    While no command comes, an owner that wants it is polled.
    """
    side: Side | None = None
    while True:
        while isinstance(side, Owner) and not connection.poll(side.look_seconds):
            side.look()
        command = COMMANDS.decode(connection.recv_bytes())
        answer: Answer
        try:
            if isinstance(command, Begin):
                side = make_side(command, files)
                answer = Begun(side.means if isinstance(side, Owner) else b"")
            elif side is None:
                raise SideFailed("it has not begun")
            else:
                answer = obey(side, command)
        except BackendUnavailable as e:
            answer = NotInstalled(str(e))
        except Exception as e:  # noqa: BLE001
            # Libraries raise many types of exceptions. The parent waits for an answer, so each is sent to it and
            # reported there.
            answer = Failed(str(e) if isinstance(e, SideFailed) else f"{type(e).__name__}: {e}")
        connection.send_bytes(encode(answer))


def main() -> None:
    """Serve the parent's commands over an inherited pipe until the parent closes it."""
    parent, number, source, destination = map(int, sys.argv[1:])
    die_with_parent(parent)
    # What libraries print is shown with errors.
    os.dup2(2, 1)
    try:
        serve(Connection(number), Descriptors(source, destination))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        # Without the interpreter's own way out, in which NIXL crashes.
        os._exit(0)


if __name__ == "__main__":
    main()
