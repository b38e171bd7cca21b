"""One direction of a pair: the connection that gives a writer access to a pool, on either end.

outgoing: DIALLING ─▶ GREETING ─▶ OPENING ─▶ OPEN ─▶ CLOSED          incoming: GREETING ─▶ OPEN ─▶ CLOSED
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum

from ...wire.stream import Stream
from ..pages import PageWrite
from .base import WriteHandle
from .handshake import Offer


class LinkPhase(Enum):
    """How far a link is."""

    DIALLING = "dialling"
    GREETING = "greeting"
    OPENING = "opening"
    OPEN = "open"
    CLOSED = "closed"


class Link:
    """What both directions share. ``peer`` is "" for an incoming link that has not introduced itself."""

    def __init__(self, stream: Stream, peer: str, phase: LinkPhase) -> None:
        self.stream = stream
        self.peer = peer
        self.phase = phase
        self.handshake_deadline: float | None = None

    @property
    def deadline(self) -> float | None:
        """``time.monotonic()`` at which the peer's silence means that it is gone; None while it owes us nothing."""
        return self.stalled_at() if self.phase is LinkPhase.OPEN else self.handshake_deadline

    @property
    def paused(self) -> bool:
        """Whether nothing is to be read for now."""
        return False

    def stalled_at(self) -> float | None:
        """As ``deadline``, of an open link."""
        return None

    def opened(self) -> None:
        """The handshake is over; raises ``LinkLost`` where the link is of no use after all."""

    def closed(self, reason: str) -> None:
        """The connection is closed; give back what hangs on it."""


class OutgoingLink(Link, ABC):
    """The writer's end."""

    def __init__(self, stream: Stream, offer: Offer) -> None:
        super().__init__(stream, offer.epoch, LinkPhase.DIALLING)
        self.offer = offer

    def welcomed(self, means: bytes) -> None:
        """The peer lets us in; ``means``: what to write by. Raises ``LinkLost`` where that is of no use."""

    def is_ready(self) -> bool:
        """Whether it can be written by now. Raises ``LinkLost`` where that will never be so."""
        return True

    @abstractmethod
    def write(self, pages: PageWrite) -> WriteHandle:
        """As ``TransferBackend.write``, of pages that both pools have."""


class IncomingLink(Link):
    """The pool's end."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream, "", LinkPhase.GREETING)

    def welcome(self) -> bytes:
        """Let the peer in; returns what it writes by, beside this connection. Raises ``LinkLost``."""
        return b""

    def let_go(self) -> bool:
        """End the writer's access; False where only the writer can, and has been asked to. May be called again."""
        return True
