"""One end of a link: the connection that gives a writer access to a peer's pool.

outgoing: DIALLING ─▶ GREETING ─▶ OPENING ─▶ OPEN ─▶ CLOSED          incoming: GREETING ─▶ OPEN ─▶ CLOSED
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from enum import Enum

from ...wire.stream import Stream
from ..page_write import PageWrite
from .base import WriteHandle
from .handshake import Offer


class LinkPhase(Enum):
    """State of a link; the module docstring draws the transitions."""

    DIALLING = "dialling"
    GREETING = "greeting"
    OPENING = "opening"
    OPEN = "open"
    CLOSED = "closed"


class Link:
    """Common part of both directions. ``peer`` is "" for an incoming link before its greeting."""

    def __init__(self, stream: Stream, peer: str, phase: LinkPhase) -> None:
        self.stream = stream
        self.peer = peer
        self.phase = phase
        self.handshake_deadline: float | None = None

    @property
    def deadline(self) -> float | None:
        """Time (``time.monotonic()``) after which a silent peer counts as gone. None while it owes us nothing."""
        return self.stalled_at() if self.phase is LinkPhase.OPEN else self.handshake_deadline

    @property
    def paused(self) -> bool:
        """Whether reading from the connection is suspended. In this base class it never is."""
        return False

    def stalled_at(self) -> float | None:
        """Return the time (``time.monotonic()``) at which an open link ends if the peer stays silent.

        Return None if the peer owes us nothing, as always in this base class.
        """
        return None

    def overdue(self, now: float, handshake_seconds: float, stall_seconds: float) -> str | None:
        """Return why the link must end because its ``deadline`` has passed at ``now``; None if it need not.

        ``handshake_seconds`` and ``stall_seconds``: the time limits that set the deadline, for the message.
        """
        if self.phase is LinkPhase.CLOSED or self.deadline is None or self.deadline > now:
            return None
        seconds = stall_seconds if self.phase is LinkPhase.OPEN else handshake_seconds
        why = "wants to write pages that it was not asked for" if self.paused else "does not answer"
        return f"the peer {why} (for {seconds:g} s)"

    def opened(self) -> None:
        """Begin to use the link after the handshake. Raises ``LinkLost`` if it is unusable. This base class does
        nothing.
        """

    def closed(self, reason: str) -> None:
        """Release the link's resources: its connection was closed for ``reason``. This base class does nothing."""


class OutgoingLink(Link, ABC):
    """The writer's end of a link."""

    def __init__(self, stream: Stream, offer: Offer) -> None:
        super().__init__(stream, offer.epoch, LinkPhase.DIALLING)
        self.offer = offer

    def welcomed(self, means: bytes) -> None:
        """Take in ``means``, the peer's description of how to write. Raises ``LinkLost`` if it is unusable.

        This base class ignores it.
        """

    def is_ready(self) -> bool:
        """Return whether the link can write now; in this base class always. Raises ``LinkLost`` if it never will."""
        return True

    @abstractmethod
    def write(self, pages: PageWrite) -> WriteHandle:
        """Start to write pages that both pools have, and return a handle for the end of the write."""


class IncomingLink(Link):
    """The pool owner's end of a link."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream, "", LinkPhase.GREETING)

    def welcome(self) -> bytes:
        """Prepare for the peer's writes, and return the description of how to write, b"" in this base class.

        Raises ``LinkLost``.
        """
        return b""

    def let_go(self) -> bool:
        """End the writer's access, and return True. Return False if only the writer can end it; it has then been asked
        to.

        May be called again. This base class has nothing to end.
        """
        return True


def one_too_many(links: Iterable[Link], limit: int) -> IncomingLink | None:
    """Return the link that has waited longest for its writer's greeting if ``limit`` or more wait, otherwise None."""
    strangers = [k for k in links if isinstance(k, IncomingLink) and k.phase is LinkPhase.GREETING]
    if len(strangers) < limit:
        return None
    return min(strangers, key=lambda link: link.handshake_deadline or 0.0)


def seconds_left(deadlines: Iterable[float | None], timeout: float | None) -> float | None:
    """Return the seconds until the first of ``deadlines`` (``time.monotonic()``, None: none), at most ``timeout``.

    Return ``timeout``, which may be None for no limit, if there is no deadline.
    """
    times = [t for t in deadlines if t is not None]
    if not times:
        return timeout
    left = max(0.0, min(times) - time.monotonic())
    return left if timeout is None else min(left, timeout)
