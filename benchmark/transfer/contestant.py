"""One way of moving bytes, with its processes.

begin the owner, begin the writer, connect ─▶ prepare(pages) ─▶ measure … ─▶ prepare(other pages) ─▶ measure …
"""

from __future__ import annotations

from contextlib import ExitStack
from statistics import median
from types import TracebackType
from typing import TypeVar

from ...messages.base import pack_i32
from .cases import PageLists
from .messages import (
    Answer,
    Begin,
    Begun,
    Connect,
    Done,
    Grant,
    How,
    Move,
    Moved,
    NotInstalled,
    Role,
    Verified,
    Verify,
    Way,
)
from .pools import SharedPools
from .process import SideError, SideProcess
from .results import Round

A = TypeVar("A", bound=Answer)


class LeftOut(Exception):
    """What it needs is not installed; the message says how to get it."""


class Contestant:
    """A way to move bytes (``way``) with its processes started. Use it as a context; the end of the context kills them.

    Every method may raise ``SideError``. After that the object can't be used any more.
    """

    def __init__(self, way: Way, pools: SharedPools) -> None:
        """Start and connect the processes of ``way``. Raises ``LeftOut`` if its library is not installed."""
        self.way = way
        self._pools = pools
        self._pages: PageLists | None = None
        self._ending = ExitStack()
        self._owner: SideProcess | None = None
        try:
            self._connect()
        except BaseException:  # also when interrupted: its processes must not outlive it
            self._ending.close()
            raise

    def _connect(self) -> None:
        # Both are loading before either is waited for.
        self._writer = self._process(Role.WRITER)
        means = b""
        if self.way.how is not How.MEMCPY:
            self._owner = self._process(Role.OWNER)
            means = self._begin(self._owner, Role.OWNER)
        self._begin(self._writer, Role.WRITER)
        _expect(Done, self._writer.ask(Connect(means)))

    def _process(self, role: Role) -> SideProcess:
        return self._ending.enter_context(SideProcess(f"the {role.value} of {self.way.label}", self._pools))

    def _begin(self, side: SideProcess, role: Role) -> bytes:
        """Prepare process ``side`` for ``role`` and return what the other side needs to reach it, b"" for nothing.

        Raises ``LeftOut`` if a library is missing.
        """
        answer = side.ask(Begin(self.way.how, self.way.backend, role, self._pools.page_bytes, self._pools.num_pages))
        if isinstance(answer, NotInstalled):
            raise LeftOut(answer.error)
        return _expect(Begun, answer).means

    def prepare(self, pages: PageLists) -> None:
        """Choose ``pages`` for the next measurements, move them once, and check that their bytes have arrived.

        Raises ``SideError`` if they have not. The whole destination is cleared before.
        """
        self._pages = pages
        self._pools.clear()
        self._grant(pack_i32(pages.dst))
        self._move(0.0, hashed=True)
        self._grant(b"")
        if not self._pools.has_landed(pages):
            raise SideError(f"{self.way.label} left other bytes behind than it was given")

    def measure(self, seconds: float) -> Round:
        """Move the prepared pages for one round, and return the median seconds of a request.

        Moving with checksums, without them, and verifying are each measured for ``seconds``. What this way of moving
        lacks is None.
        """
        assert self._pages is not None
        there = pack_i32(self._pages.dst)
        self._grant(there)
        moved = self._move(seconds, hashed=True)
        unhashed = self._move(seconds, hashed=False).times if self.way.how is How.ENGINE else []
        self._grant(b"")
        verified: list[float] = []
        if self.way.how is not How.RAW:
            side = self._owner or self._writer
            verified = _expect(Verified, side.ask(Verify(there, moved.slices, seconds), seconds)).times
        return Round(median(moved.times), _median(unhashed), _median(verified))

    def _grant(self, pages: bytes) -> None:
        if self._owner is not None:
            _expect(Done, self._owner.ask(Grant(pages)))

    def _move(self, seconds: float, *, hashed: bool) -> Moved:
        assert self._pages is not None
        command = Move(pack_i32(self._pages.src), pack_i32(self._pages.dst), seconds, hashed)
        return _expect(Moved, self._writer.ask(command, seconds))

    def __enter__(self) -> Contestant:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Kill the way's processes, if they still run."""
        self._ending.close()


def _median(values: list[float]) -> float | None:
    return median(values) if values else None


def _expect(kind: type[A], answer: Answer) -> A:
    if not isinstance(answer, kind):
        raise SideError(f"answered by {type(answer).__name__} instead of {kind.__name__}")
    return answer
