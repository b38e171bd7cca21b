"""The interface of transfer backends: one-sided writes from this worker's KV pool into a peer's.

A *link* is the permission and the connection to write, in one direction. A pair of peers (named by epoch) has up to two
links. ``connect`` opens the outgoing one. The peer opens the incoming one with the metadata that our ``register``
returned. Both end together: a lost or closed link also closes the one in the other direction. When neither side can
write any more, one ``LinkDown`` follows.

    connect ─▶ LinkUp ─▶ write … poll ─▶ (disconnect | the link breaks) ─▶ LinkDown
         └───▶ ConnectFailed                                                  │
                        writers of this epoch are refused until `admit` ◀─────┘

After its link went down, a peer is refused until the owner admits it again. So ``LinkDown`` guarantees that the pages
are safe to reuse: no connection that the peer opened earlier, or opens by itself, can write after it.

Not every backend can revoke access by itself; its ``Capabilities`` say so. If only the writer can end its access,
``LinkDown`` comes after the writer has done so or is dead. Until then the pages stay unused.

One thread owns a backend and calls everything but ``wake``. Only ``progress`` waits, up to its timeout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from ....mem_cache.kv_pages.page_group import PageGroup
from ....mem_cache.kv_pages.region import RegionError
from ....messages.base import I32, HandoverId
from ..page_checksums import PageChecksums
from ..page_write import PageWrite


class WriteState(Enum):
    """State of a write."""

    PENDING = "pending"
    DONE = "done"
    """Every byte is in the peer's pool."""
    FAILED = "failed"
    """Some bytes may be in the peer's pool, and no more will arrive."""
    LOST = "lost"
    """It is unknown here whether more bytes will arrive. The link must end; with its ``LinkDown`` the write fails."""


class Completion(Enum):
    """How the end of a write becomes known."""

    AT_ONCE = "at once"
    """``write`` returns after it."""
    SIGNALLED = "signalled"
    """``progress`` returns because of it."""
    POLLED = "polled"
    """Only calls of ``progress`` find it, so these must be repeated while writes are under way."""
    DRIVEN = "driven"
    """Only calls of ``progress`` move data and find the end of a write, so they must be repeated until then."""


class Capabilities(NamedTuple):
    """Guarantees of a backend."""

    moves_data: bool = True
    """False if no bytes are moved, so that a checksum of the destination would be meaningless."""
    revokes: bool = True
    """Whether the owner of a pool can end a writer's access without the writer's help.

    Otherwise ``LinkDown`` waits for the writer, and the pages stay unused until then.
    """
    checks_grants: bool = False
    """Whether a peer's writes are checked against the pages granted to its hand-over.

    Otherwise a peer that may write at all may write anywhere.
    """
    completion: Completion = Completion.SIGNALLED


class WriteHandle:
    """One write that was started. Only its backend changes it. ``error`` says why it failed."""

    __slots__ = ("error", "state")

    def __init__(self, state: WriteState = WriteState.PENDING) -> None:
        self.state = state
        self.error = ""


class LinkUp(NamedTuple):
    """Event: ``connect`` succeeded, and pages can be written to the peer."""

    peer: str


class Admitted(NamedTuple):
    """Event: ``admit`` took effect, and the peer may open an incoming link."""

    peer: str


class ConnectFailed(NamedTuple):
    """Event: ``connect`` or ``admit`` failed and left nothing behind. ``error`` says what to do."""

    peer: str
    error: str


class LinkDown(NamedTuple):
    """Event: neither side can write to the other any more.

    The peer is refused until admitted. Our writes to it have failed.
    """

    peer: str
    reason: str


LinkEvent = LinkUp | Admitted | ConnectFailed | LinkDown


class TransferBackend(ABC):
    """Base class of backends, which move pages between the registered pools and those of peers."""

    can = Capabilities()

    def grant(self, peer: str, handover: HandoverId, pages: I32, group: int = 0) -> None:  # noqa: B027
        """Allow ``peer``, and no other peer, to write ``pages`` of our pool ``group`` for ``handover``.

        The base class does nothing: without grants, a peer that may write at all may write anywhere.
        """

    def note_checksums_in(self, peer: str, handover: HandoverId, landed: PageChecksums) -> None:
        """Have the checksums of all pages that ``peer`` will write for ``handover`` recorded in ``landed``.

        Called before the hand-over's first grant, only if pages pass through host memory to a device. The base class
        raises ``RegionError``: it can't write to a device.
        """
        raise RegionError(f"{type(self).__name__} can't write to a device")

    def revoke(self, peer: str, handover: HandoverId) -> None:  # noqa: B027
        """End the permission of ``peer`` to write pages for ``handover``. The base class does nothing."""

    @abstractmethod
    def register(self, groups: Sequence[PageGroup]) -> bytes:
        """Open the pools to peers, and return the metadata that peers need to reach them.

        Called once, before all other methods. Raises ``RegionError``.
        """

    @abstractmethod
    def connect(self, peer: str, metadata: bytes) -> None:
        """Start to open the outgoing link to ``peer``, which also admits it. ``LinkUp`` or ``ConnectFailed`` follows.

        ``metadata``: what the peer's ``register`` returned. For a peer that is connected already, ``LinkUp`` follows at
        once. While the links to it are going down, the attempt waits for its ``LinkDown``.
        """

    @abstractmethod
    def admit(self, peer: str) -> None:
        """Let a peer open an incoming link, which is refused after its link went down.

        ``Admitted`` or ``ConnectFailed`` follows.
        """

    @abstractmethod
    def write(self, pages: PageWrite) -> WriteHandle:
        """Start to copy our pages to the peer's.

        Our bytes must not change before the handle leaves ``PENDING``. Raises ``NotConnected``, and ``BadPages`` for
        pages that either pool does not have.
        """

    def lands_on_device(self, peer: str) -> bool:
        """Return whether writes to a connected peer go directly into a pool on a device. Here they never do."""
        return False

    @abstractmethod
    def poll(self, handle: WriteHandle) -> WriteState:
        """Return the state of a write, which changes only in ``progress`` and ``disconnect``."""

    @abstractmethod
    def disconnect(self, peer: str) -> None:
        """Close both links to ``peer``. One ``LinkDown`` follows, also for a peer without links.

        It may be late: if only the writer can end its access, it waits until the writer does so or dies.
        """

    @abstractmethod
    def progress(self, timeout: float | None) -> list[LinkEvent]:
        """Do the I/O that is possible, and return the events since the last call: links up, down or failed, peers
        admitted.

        Wait up to ``timeout`` seconds for something to do (None: for ever).
        """

    @abstractmethod
    def wake(self) -> None:
        """Make a waiting ``progress`` return. This is the only method that other threads may call."""

    @abstractmethod
    def close(self) -> None:
        """Close all links and sockets at once, without events. The pools' memory stays."""
