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

Not every backend can keep that promise by itself: what it can do is in its ``Capabilities``. Where only the writer can
end its access, ``LinkDown`` comes when it has, or is dead; until then the pages wait.

One thread owns a backend and calls everything but ``wake``. Only ``progress`` waits, as long as it is told.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from ....messages.base import I32, HandoverId
from ...errors import RegionError
from ..page_checksums import PageChecksums
from ..pages import PageGroup, PageWrite


class WriteState(Enum):
    """Where a write is.

    ``DONE``: every byte is in the peer's pool. ``FAILED``: some may be, and no more will. ``LOST``: nobody here can
    tell whether more will; the link has to end, with whose ``LinkDown`` it has failed.
    """

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"
    LOST = "lost"


class Completion(Enum):
    """How the end of a write becomes known.

    ``AT_ONCE``: ``write`` returns behind it. ``SIGNALLED``: ``progress`` returns because of it. ``POLLED``: to nobody
    but who asks, by ``progress``, while writes are under way. ``DRIVEN``: the same, and nothing moves but while
    somebody asks.
    """

    AT_ONCE = "at once"
    SIGNALLED = "signalled"
    POLLED = "polled"
    DRIVEN = "driven"


class Capabilities(NamedTuple):
    """What a backend can promise.

    ``moves_data``: False where nothing is moved, so that a checksum of the destination would mean nothing.
    ``revokes``: whether the owner of a pool can end a writer's access, whatever the writer does or is unable to do;
    else its ``LinkDown`` waits for the writer, and so do the pages.
    ``checks_grants``: whether what a peer writes is held against the pages that its hand-over was granted. Where it
    isn't, a peer that may write at all may write anywhere.
    """

    moves_data: bool = True
    revokes: bool = True
    checks_grants: bool = False
    completion: Completion = Completion.SIGNALLED


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
    """Moves pages between the registered pools and those of peers."""

    can = Capabilities()

    def grant(self, peer: str, handover: HandoverId, pages: I32, group: int = 0) -> None:  # noqa: B027
        """``peer`` may write ``pages`` of a pool of ours for ``handover`` from now on, and nobody else."""

    def note_checksums_in(self, peer: str, handover: HandoverId, landed: PageChecksums) -> None:
        """What ``peer`` writes for ``handover`` is on a device afterwards: note it. Before the first grant.

        Raises ``RegionError`` where pools on a device can't be written.
        """
        raise RegionError(f"{type(self).__name__} can't write to a device")

    def revoke(self, peer: str, handover: HandoverId) -> None:  # noqa: B027
        """``peer`` may write no pages for ``handover`` any more."""

    @abstractmethod
    def register(self, groups: Sequence[PageGroup]) -> bytes:
        """Open the pools to peers; returns what they need to reach them. Called once, first. Raises ``RegionError``."""

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
    def write(self, pages: PageWrite) -> WriteHandle:
        """Start to copy pages of ours to the peer's.

        Our bytes must not change before the handle leaves ``PENDING``. Raises ``NotConnected``, and ``BadPages`` for
        what either pool does not have.
        """

    def lands_on_device(self, peer: str) -> bool:
        """Return whether a write to a connected peer lands in its pool on a device at once."""
        return False

    @abstractmethod
    def poll(self, handle: WriteHandle) -> WriteState:
        """State of a write; changes only in ``progress`` and ``disconnect``."""

    @abstractmethod
    def disconnect(self, peer: str) -> None:
        """Close both links; one ``LinkDown`` follows, also for a peer that has none.

        It may follow late: where only the writer can end its access, not before the writer lets go or dies.
        """

    @abstractmethod
    def progress(self, timeout: float | None) -> list[LinkEvent]:
        """Do what I/O can be done; returns what happened to links. Waits up to ``timeout`` seconds (None: for ever)."""

    @abstractmethod
    def wake(self) -> None:
        """Make a waiting ``progress`` return. The only method for other threads."""

    @abstractmethod
    def close(self) -> None:
        """Close everything at once, without events. The regions stay."""
