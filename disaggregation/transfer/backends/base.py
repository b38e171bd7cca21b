"""What a transfer backend does: one-sided writes from this worker's KV pool into a peer's.

A *link* is the permission and the means to write, in one direction. A pair of peers (named by epoch) has up to two:
the outgoing one, opened by ``connect``, and the incoming one, which the peer opens with the metadata that our
``register`` gave. They fall together: a lost or closed link takes the one in the other direction along, and when
neither side can write any more, one ``LinkDown`` says so.

    connect ─▶ LinkUp ─▶ write … poll ─▶ (disconnect | the link breaks) ─▶ LinkDown
         └───▶ ConnectFailed                                                  │
                        writers of this epoch are refused until `admit` ◀─────┘

Because a peer whose link went down is refused until the owner admits it again, ``LinkDown`` may be taken as the word
that its pages are safe to reuse: no connection that it opened earlier, or opens by itself, can write after it.

One thread owns a backend and calls everything but ``wake``. Only ``progress`` waits, as long as it is told.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ....messages.base import I32
from ...errors import BadSpans
from ..region import KVRegion

Spans = npt.NDArray[np.int64]
"""[N, 2]: offset and length in bytes of N pieces of a region."""


class WriteState(Enum):
    """Where a write is. ``DONE``: every byte is in the peer's pool. ``FAILED``: some may be, and no more will."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class WriteHandle:
    """One write on its way; only its backend changes it. ``error`` says why it failed."""

    __slots__ = ("error", "state")

    def __init__(self, state: WriteState = WriteState.PENDING) -> None:
        self.state = state
        self.error = ""


class LinkUp(NamedTuple):
    """``connect`` succeeded: the peer can be written to."""

    peer: str


class Admitted(NamedTuple):
    """``admit`` took effect: the peer may open an incoming link."""

    peer: str


class ConnectFailed(NamedTuple):
    """``connect`` or ``admit`` failed; ``error`` says what to do. Nothing is left of the attempt."""

    peer: str
    error: str


class LinkDown(NamedTuple):
    """Neither side can write to the other any more, and the peer is refused until admitted. Its writes have failed."""

    peer: str
    reason: str


LinkEvent = LinkUp | Admitted | ConnectFailed | LinkDown


class TransferBackend(ABC):
    """Moves bytes between the registered region and those of peers."""

    moves_data = True
    """False where nothing is moved, so that a checksum of the destination would mean nothing."""

    checks_grants = False
    """Whether what a peer writes is held against the pages that it was granted. Where it isn't, a peer that may write
    at all may write anywhere but page 0."""

    def grant(self, peer: str, pages: I32) -> None:  # noqa: B027
        """``peer`` may write ``pages`` of our region from now on, and nobody else."""

    def revoke(self, pages: I32) -> None:  # noqa: B027
        """Nobody may write ``pages`` any more."""

    @abstractmethod
    def register(self, region: KVRegion, page_bytes: int) -> bytes:
        """Open ``region`` to peers; returns what they need to reach it. Called once, first. Raises ``RegionError``."""

    @abstractmethod
    def connect(self, peer: str, metadata: bytes) -> None:
        """Start to open the outgoing link, which admits the peer too; ``LinkUp`` or ``ConnectFailed`` follows.

        A peer that is connected already gets ``LinkUp`` at once. While the links to the peer are still going down, the
        attempt waits for its ``LinkDown``.
        """

    @abstractmethod
    def admit(self, peer: str) -> None:
        """Let a peer whose link went down open an incoming link again; ``Admitted`` or ``ConnectFailed`` follows."""

    @abstractmethod
    def write(self, peer: str, local: Spans, remote: Spans) -> WriteHandle:
        """Start to copy ``local[i]`` of our region to ``remote[i]`` of the peer's (equal lengths).

        Our bytes must not change before the handle leaves ``PENDING``. Writes to a peer land in order. Raises
        ``NotConnected``, and ``BadSpans`` where spans lie outside of either region or do not match.
        """

    @abstractmethod
    def poll(self, handle: WriteHandle) -> WriteState:
        """State of a write; changes only in ``progress`` and ``disconnect``."""

    @abstractmethod
    def disconnect(self, peer: str) -> None:
        """Close both links; one ``LinkDown`` follows, also for a peer that has none.

        It may follow late: where only the writer can end its access (``shm``), not before the writer lets go or dies.
        """

    @abstractmethod
    def progress(self, timeout: float | None) -> list[LinkEvent]:
        """Do what I/O can be done; returns what happened to links. Waits up to ``timeout`` seconds (None: for ever)."""

    @abstractmethod
    def wake(self) -> None:
        """Make a waiting ``progress`` return. The only method for other threads."""

    @abstractmethod
    def close(self) -> None:
        """Close everything at once, without events. The region stays."""


def check_spans(spans: Spans, nbytes: int, what: str, begin: int = 0) -> None:
    """Raise ``BadSpans`` unless every span is a non-empty piece of bytes ``[begin, nbytes)`` of a region.

    ``begin`` is a page's length where pages are written to: page 0 belongs to padding, not to any hand-over.
    """
    offsets, lengths = spans[:, 0], spans[:, 1]
    # `nbytes - lengths` rather than `offsets + lengths`: the sum of two hostile int64 can wrap around.
    if len(spans) and bool(
        ((lengths <= 0) | (offsets < begin) | (lengths > nbytes) | (offsets > nbytes - lengths)).any()
    ):
        raise BadSpans(f"a span lies outside of bytes {begin} … {nbytes} of the {what}")
