"""One end of a link: the connection that gives a writer access to a peer's pool.

outgoing: DIALLING ─▶ GREETING ─▶ OPENING ─▶ OPEN ─▶ CLOSED          incoming: GREETING ─▶ OPEN ─▶ CLOSED
"""

from __future__ import annotations

from abc import ABC, abstractmethod
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
        """Whether reading from the connection is suspended."""
        return False

    def stalled_at(self) -> float | None:
        """Return the ``deadline`` of an open link."""
        return None

    def opened(self) -> None:
        """Begin to use the link after the handshake. Raises ``LinkLost`` if it is unusable after all."""

    def closed(self, reason: str) -> None:
        """Release the link's resources after its connection was closed, for ``reason``."""


class OutgoingLink(Link, ABC):
    """The writer's end of a link."""

    def __init__(self, stream: Stream, offer: Offer) -> None:
        super().__init__(stream, offer.epoch, LinkPhase.DIALLING)
        self.offer = offer

    def welcomed(self, means: bytes) -> None:
        """Take the peer's description of how to write (``means``). Raises ``LinkLost`` if it is unusable."""

    def is_ready(self) -> bool:
        """Return whether the link can write now. Raises ``LinkLost`` if it never will."""
        return True

    @abstractmethod
    def write(self, pages: PageWrite) -> WriteHandle:
        """Start to write pages that both pools have; see ``TransferBackend.write``."""


class IncomingLink(Link):
    """The pool owner's end of a link."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream, "", LinkPhase.GREETING)

    def welcome(self) -> bytes:
        """Prepare for the peer's writes, and return the description of how to write. Raises ``LinkLost``."""
        return b""

    def let_go(self) -> bool:
        """End the writer's access. Return False if only the writer can; it has then been asked to.

        May be called again.
        """
        return True
