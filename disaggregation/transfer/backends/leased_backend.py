"""What backends have in common whose bytes are moved by a library: ``nixl`` and ``mooncake``.

Such a library writes one-sidedly: the owner of a pool neither sees who writes nor hears that a writer has died, and
has no call that ends one writer's access. So each link has a connection of ours beside it, the *lease*: it tells who
the writer is (``handshake.py``), and its end tells that a process has ended. And each link has ends of the library of
its own: the owner's (``Door``) is made for one peer and is unmade with the link, and what was unmade lets nobody
write any more; the writer's (``Courier``) can be left behind with all that it had under way. What was tried before
this was chosen is in docs/disaggregation.md, and in tests/proofs.

    writer: dials ─▶ Greeting ────────────────▶ Verdict(means) ─▶ courier, first contact ─▶ LinkUp
    owner:                      door for it ────┘                       the lease ends ─▶ door closed ─▶ LinkDown
"""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ....messages.base import I32, HandoverId
from ....messages.decode import UndeclaredMessage, decode
from ...errors import LinkLost, RegionError
from ...wire import tcp_socket
from ...wire.stream import Stream, expect_end
from ..pages import PageGroup, PageWrite
from . import tcp_place
from .base import Capabilities, Completion, WriteHandle, WriteState
from .handshake import MAX_GROUPS, MAX_MEANS, Offer
from .link import IncomingLink, LinkPhase, OutgoingLink
from .socket_backend import SocketBackend


class Means(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``end``: how the library finds a door. ``addresses``: of the pools behind it, in the owner's process."""

    end: Annotated[bytes, Meta(max_length=MAX_MEANS)]
    addresses: Annotated[list[Annotated[int, Meta(ge=1, le=1 << 62)]], Meta(min_length=1, max_length=MAX_GROUPS)]


_MEANS = msgspec.msgpack.Decoder(Means)


class Door(ABC):
    """The library's end by which one peer writes our pools. ``end``: how that peer's library finds it."""

    end: bytes

    def look(self) -> None:  # noqa: B027
        """Let the library take what has come. Raises ``LinkLost``."""

    @abstractmethod
    def close(self) -> None:
        """Nothing is written any more once this has returned."""


class Courier(ABC):
    """The library's end by which one peer's pools are written. Each method may raise ``LinkLost``, and never waits."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether the library has reached the peer."""

    @abstractmethod
    def start(self, pages: PageWrite) -> Any:
        """Begin to write; returns what ``has_landed`` is asked with, for as long as it says no."""

    @abstractmethod
    def has_landed(self, write: Any) -> bool:
        """Whether every byte is in the peer's pool."""

    @abstractmethod
    def close(self) -> None:
        """Leave everything that is under way."""


class LeasedBackend(SocketBackend):
    """See the module; ``host`` is the address to listen on, and to be reached at unless ``advertise_host`` is."""

    can = Capabilities(completion=Completion.POLLED)
    place = ""
    """Where others reach this instance."""
    asks_doors = False
    """Whether pages land only where the library is asked to take them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._granted: set[tuple[str, HandoverId]] = set()

    def register(self, groups: Sequence[PageGroup]) -> bytes:
        if any(group.staging is not None for group in groups):
            raise RegionError(f"the {self.name} backend moves KV of the host's memory alone: use tcp or shm")
        return super().register(groups)

    def grant(self, peer: str, handover: HandoverId, pages: I32, group: int = 0) -> None:
        self._granted.add((peer, handover))

    def revoke(self, peer: str, handover: HandoverId) -> None:
        self._granted.discard((peer, handover))

    @abstractmethod
    def door(self) -> Door:
        """For one peer. Raises ``LinkLost``."""

    @abstractmethod
    def _courier(self, offer: Offer, means: Means) -> Courier:
        """To one peer. Raises ``LinkLost``."""

    def means_of(self, door: Door) -> bytes:
        """What a peer is told of its door."""
        return msgspec.msgpack.encode(Means(door.end, [group.region.address for group in self.groups]))

    def courier_to(self, offer: Offer, told: bytes) -> Courier:
        """To the peer that has told this of its door. Raises ``LinkLost``."""
        try:
            means = decode(_MEANS, told, MAX_MEANS)
        except UndeclaredMessage as e:
            raise LinkLost(f"the peer does not say how {self.name} reaches it: {e}") from e
        if len(means.addresses) != len(offer.groups):
            raise LinkLost("the peer has other pools than it said")
        return self._courier(offer, means)

    def _listen(self) -> tuple[socket.socket, Offer]:
        sock, self.place, port = tcp_place.listen(self.host, self.port, self.advertise_host)
        return sock, self._offer(self.place, port)

    def _dial(self, offer: Offer) -> OutgoingLink:
        return _LeaseWriter(Stream(tcp_place.dial(offer, self._tune)), offer, self)

    def _unreachable(self, offer: Offer, reason: str) -> str:
        return tcp_place.unreachable(offer, reason)

    def _accepted(self, sock: socket.socket) -> IncomingLink:
        self._tune(sock)
        return _LeaseReader(Stream(sock), self)

    def _tune(self, sock: socket.socket) -> None:
        tcp_socket.tune(sock, self.stall_seconds)

    def _advance(self) -> None:
        for link in list(self._links):
            try:
                if isinstance(link, _LeaseReader):
                    link.look()
                elif isinstance(link, _LeaseWriter) and link.phase is LinkPhase.OPENING:
                    self._open_if_ready(link)
                elif isinstance(link, _LeaseWriter) and link.phase is LinkPhase.OPEN:
                    link.look()
            except LinkLost as e:
                self._lost(link, str(e))

    def _until_deadline(self, timeout: float | None) -> float | None:
        left = super()._until_deadline(timeout)
        most = self._attention()
        return most if left is None or (most is not None and most < left) else left

    def _attention(self) -> float | None:
        """Seconds after which the library is to be looked after again; None: it needs nobody."""
        if any(link.phase is LinkPhase.OPENING for link in self._links):
            return OPENING_SECONDS
        doors = [link for link in self._links if isinstance(link, _LeaseReader)] if self.asks_doors else []
        if not doors:
            return None
        newest = max(link.opened_at for link in doors)
        busy = self._granted or time.monotonic() - newest < self.handshake_seconds
        return POLL_SECONDS if busy else IDLE_SECONDS


OPENING_SECONDS = 0.002
"""How often it is looked whether a library has reached a peer."""
POLL_SECONDS = 0.0005
"""How often a door is looked after that somebody may write by, or through which somebody is about to come."""
IDLE_SECONDS = 0.05


class _LeaseReader(IncomingLink):
    def __init__(self, stream: Stream, backend: LeasedBackend) -> None:
        super().__init__(stream)
        self.opened_at = 0.0
        self._backend = backend
        self._door: Door | None = None

    def welcome(self) -> bytes:
        self._door = self._backend.door()
        return self._backend.means_of(self._door)

    def opened(self) -> None:
        self.opened_at = time.monotonic()
        expect_end(self.stream)

    def look(self) -> None:
        """Let what has come land."""
        if self._door is not None:
            self._door.look()

    def closed(self, reason: str) -> None:
        door, self._door = self._door, None
        if door is not None:
            door.close()


class _LeaseWriter(OutgoingLink):
    def __init__(self, stream: Stream, offer: Offer, backend: LeasedBackend) -> None:
        super().__init__(stream, offer)
        self._backend = backend
        self._courier: Courier | None = None
        self._under_way: deque[tuple[WriteHandle, Any]] = deque()
        self._not_taken: list[WriteHandle] = []

    def opened(self) -> None:
        expect_end(self.stream)

    def welcomed(self, means: bytes) -> None:
        self._courier = self._backend.courier_to(self.offer, means)

    def is_ready(self) -> bool:
        assert self._courier is not None
        return self._courier.is_ready()

    def write(self, pages: PageWrite) -> WriteHandle:
        assert self._courier is not None
        if not self._under_way:
            self.stream.last_progress = time.monotonic()
        handle = WriteHandle()
        try:
            self._under_way.append((handle, self._courier.start(pages)))
        except LinkLost as e:
            # The link has to go, but not within this call, whose caller has no handle yet.
            handle.state, handle.error = WriteState.LOST, str(e)
            self._not_taken.append(handle)
        return handle

    def look(self) -> None:
        """Take note of writes that have landed."""
        assert self._courier is not None
        left = deque[tuple[WriteHandle, Any]]()
        for handle, write in self._under_way:
            if self._courier.has_landed(write):
                handle.state = WriteState.DONE
                self.stream.last_progress = time.monotonic()
            else:
                left.append((handle, write))
        self._under_way = left

    def stalled_at(self) -> float | None:
        return self.stream.last_progress + self._backend.stall_seconds if self._under_way else None

    def closed(self, reason: str) -> None:
        for handle in (*(handle for handle, _ in self._under_way), *self._not_taken):
            handle.state, handle.error = WriteState.FAILED, handle.error or reason
        self._under_way.clear()
        self._not_taken.clear()
        courier, self._courier = self._courier, None
        if courier is not None:
            courier.close()
