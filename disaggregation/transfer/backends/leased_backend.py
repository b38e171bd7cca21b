"""Common base of the backends that move bytes by a library: ``nixl`` and ``mooncake``.

Such a library writes one-sidedly. The owner of a pool neither sees which peer writes nor learns that a writer has died,
and no call ends one writer's access. So each link has a connection of ours beside it, the *lease*. It identifies the
writer (``handshake.py``), and its end shows that a process has ended.

Each link also has library objects of its own. The owner's ``Endpoint`` is made for one peer and closed with the link. A
closed endpoint accepts no more writes. The writer's ``Initiator`` can be dropped with all that it had under way.
docs/disaggregation.md and tests/proofs describe the alternatives that were tried.

If the owner's pool is on a device, the library writes to slabs in its host memory. Only the slabs are opened to peers
then, and the lease carries the messages about them (``leased_slabs.py``).

    writer: dials ─▶ Greeting ────────────────▶ GreetingAnswer(means) ─▶ initiator, first contact ─▶ LinkUp
    owner:                  endpoint for it ────┘                    the lease ends ─▶ endpoint closed ─▶ LinkDown
"""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from ....mem_cache.kv_pages.page_group import PageGroup, Spans
from ....mem_cache.kv_pages.region import RegionError
from ....mem_cache.kv_pages.staging import Slabs
from ....messages.base import I32, HandoverId
from ....messages.decode import UndeclaredMessage, decode
from ...errors import LinkLost
from ...wire import tcp_socket
from ...wire.stream import Stream, expect_end
from ..page_checksums import PageChecksums
from ..page_write import PageWrite
from . import tcp_address
from .base import Capabilities, Completion, WriteHandle, WriteState
from .grants import Writer
from .handshake import MAX_GROUPS, MAX_MEANS, Offer
from .leased_slabs import SlabReader, SlabWriter
from .link import IncomingLink, LinkPhase, OutgoingLink
from .receive_buffers import ReceiveBuffers, StagedWrite
from .socket_backend import SocketBackend

CONTACT_BYTES = 64
"""Size of the write by which a writer tests that it reaches an endpoint."""
Address = Annotated[int, Meta(ge=1, le=1 << 62)]


class EndpointInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Information that a peer needs to reach an endpoint."""

    end: Annotated[bytes, Meta(max_length=MAX_MEANS)]
    """The library's description of the endpoint."""
    addresses: Annotated[list[Address], Meta(min_length=1, max_length=MAX_GROUPS)]
    """Addresses of the pools in the owner's process, or of its slabs."""
    contact: Address
    """Address for a test write, which shows that the endpoint is reached."""
    slab_bytes: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    """Total size of the slabs in bytes, 0 without slabs."""
    device: Annotated[int, Meta(ge=0, lt=1 << 10)] | None = None
    """Device of the memory at ``addresses``, None for host memory."""


_MEANS = msgspec.msgpack.Decoder(EndpointInfo)


class MemoryRange(NamedTuple):
    """A memory range of this process to register with the library. ``device`` is None for host memory."""

    address: int
    nbytes: int
    device: int | None = None


class Endpoint(ABC):
    """Library object through which one peer writes to our pools. ``end`` describes it to that peer's library."""

    end: bytes

    def look(self) -> None:  # noqa: B027
        """Let the library process writes that have arrived. The base class does nothing. Raises ``LinkLost``."""

    @abstractmethod
    def close(self) -> None:
        """Close the endpoint. Nothing is written through it any more after this returns."""


class Initiator(ABC):
    """Library object through which we write to one peer's pools.

    Each method may raise ``LinkLost``, and never waits.
    """

    @abstractmethod
    def is_ready(self) -> bool:
        """Return whether the library has reached the peer, so that it can write."""

    @abstractmethod
    def start(self, pages: PageWrite) -> Any:
        """Begin to write pages to the peer's pool, and return a token for ``has_landed``.

        It is valid until ``has_landed`` returns True.
        """

    @abstractmethod
    def fill(self, group: int, spans: Spans, there: int) -> Any:
        """Begin to write the pieces ``spans`` of our pool ``group``, one after the other, to the peer's address
        ``there``.

        Return a token for ``has_landed``, which is valid until that returns True.
        """

    @abstractmethod
    def has_landed(self, write: Any) -> bool:
        """Return whether every byte of a write has arrived in the peer's memory; never wait.

        ``write``: what ``start`` or ``fill`` returned. It is not valid any more after True. Raises ``LinkLost`` if the
        write has failed.
        """

    @abstractmethod
    def close(self) -> None:
        """Abandon all writes under way, and release the library's objects."""


class LeasedBackend(SocketBackend):
    """Base class of backends with a lease for each link.

    ``host`` is the address to listen on. Peers reach it at ``advertise_host``, or at ``host`` without one.
    """

    can = Capabilities(completion=Completion.POLLED)
    place = ""
    """Address at which other instances reach this one."""
    polls_endpoints = False
    """Whether pages land only while ``Endpoint.look`` is called."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._granted: set[tuple[str, HandoverId]] = set()
        self._receive_buffers = ReceiveBuffers(())
        self.slabs: Slabs | None = None

    def register(self, groups: Sequence[PageGroup]) -> bytes:
        staged = [group.staging for group in groups if group.staging is not None]
        if staged:
            self.slabs = staged[0].slabs
            if len(self.slabs.memory) < self.slabs.nbytes + CONTACT_BYTES:
                raise RegionError(f"the {self.name} backend needs {CONTACT_BYTES} bytes behind the slabs")
            self._receive_buffers = ReceiveBuffers(groups)
        return super().register(groups)

    @property
    def sources(self) -> list[MemoryRange]:
        """Memory that is written to peers: the pool, or the sending slots, of each group."""
        return [
            MemoryRange(
                group.region.address, group.region.nbytes, None if group.direct is None else group.direct.ordinal
            )
            for group in self.groups
        ]

    @property
    def targets(self) -> list[MemoryRange]:
        """Memory that peers write to: the pools, or the slabs if the pools are on a device and staged."""
        if self.slabs is not None:
            return [MemoryRange(self.slabs.address, len(self.slabs.memory))]
        return self.sources

    def note_checksums_in(self, peer: str, handover: HandoverId, landed: PageChecksums) -> None:
        self._receive_buffers.note(peer, handover, landed)

    def grant(self, peer: str, handover: HandoverId, pages: I32, group: int = 0) -> None:
        self._granted.add((peer, handover))
        if self.slabs is None:
            return
        self._receive_buffers.grant(peer, handover, pages, group)
        for link in [k for k in self._links if isinstance(k, LeaseReader) and k.peer == peer]:
            self._carry_on(link, link.granted)

    def revoke(self, peer: str, handover: HandoverId) -> None:
        self._granted.discard((peer, handover))
        writer = self._receive_buffers.revoke(peer, handover)
        for link in [k for k in self._links if isinstance(k, LeaseReader) and k.is_writing(writer)]:
            self._lost(link, "the peer was still writing pages that it may not write any more")

    def lands_on_device(self, peer: str) -> bool:
        link = self._peers[peer].outgoing
        return isinstance(link, LeaseWriter) and link.lands_on_device

    def close(self) -> None:
        super().close()
        self._receive_buffers.close()

    @abstractmethod
    def endpoint(self) -> Endpoint:
        """Make the library object through which one peer writes to our pools. Raises ``LinkLost``."""

    @abstractmethod
    def _initiator(self, offer: Offer, means: EndpointInfo) -> Initiator:
        """Make the library object through which we write to one peer's pools. Raises ``LinkLost``."""

    def info_of(self, endpoint: Endpoint) -> bytes:
        """Return the encoded ``EndpointInfo``, which a peer needs to write through ``endpoint``."""
        addresses = [memory.address for memory in self.targets]
        if self.slabs is None:
            # The test write goes into page 0, which is padding.
            return msgspec.msgpack.encode(
                EndpointInfo(endpoint.end, addresses, addresses[0], device=self.targets[0].device)
            )
        contact = self.slabs.address + self.slabs.nbytes
        return msgspec.msgpack.encode(EndpointInfo(endpoint.end, addresses, contact, self.slabs.nbytes))

    def initiator_to(self, offer: Offer, packed: bytes) -> tuple[Initiator, EndpointInfo]:
        """Make the library object through which we write to the peer of ``offer``, and return it with the decoded
        ``packed``.

        ``packed`` is the ``EndpointInfo`` that the peer sent. Raises ``LinkLost``, also if that is invalid.
        """
        try:
            means = decode(_MEANS, packed, MAX_MEANS)
        except UndeclaredMessage as e:
            raise LinkLost(f"the peer does not say how {self.name} reaches it: {e}") from e
        if len(means.addresses) != (1 if means.slab_bytes else len(offer.groups)):
            raise LinkLost("the peer has other pools than it said")
        return self._initiator(offer, means), means

    def _listen(self) -> tuple[socket.socket, Offer]:
        sock, self.place, port = tcp_address.listen(self.host, self.port, self.advertise_host)
        return sock, self._offer(self.place, port)

    def _dial(self, offer: Offer) -> OutgoingLink:
        return LeaseWriter(Stream(tcp_address.dial(offer, self._tune)), offer, self)

    def _unreachable(self, offer: Offer, reason: str) -> str:
        return tcp_address.unreachable(offer, reason)

    def _accepted(self, sock: socket.socket) -> IncomingLink:
        self._tune(sock)
        return LeaseReader(Stream(sock), self, self.slabs, self._receive_buffers)

    def _tune(self, sock: socket.socket) -> None:
        tcp_socket.tune(sock, self.stall_seconds)

    def _advance(self) -> None:
        for link in list(self._links):
            if isinstance(link, LeaseReader | LeaseWriter) and link.phase in (LinkPhase.OPENING, LinkPhase.OPEN):
                self._carry_on(link, lambda link=link: self._look(link))  # type: ignore[misc]
        while (turn := self._receive_buffers.next_in_line()) is not None:
            link, staged = turn
            assert isinstance(link, LeaseReader)
            self._carry_on(link, lambda link=link, staged=staged: link.next_slab(staged))  # type: ignore[misc]

    def _look(self, link: LeaseReader | LeaseWriter) -> None:
        if isinstance(link, LeaseWriter) and link.phase is LinkPhase.OPENING:
            self._open_if_ready(link)
        else:
            link.look()

    def _until_deadline(self, timeout: float | None) -> float | None:
        left = super()._until_deadline(timeout)
        most = self._attention()
        return most if left is None or (most is not None and most < left) else left

    def _attention(self) -> float | None:
        """Return the seconds after which the library must be polled again, or None if it need not be polled."""
        if any(link.phase is LinkPhase.OPENING for link in self._links):
            return OPENING_SECONDS
        endpoints = [link for link in self._links if isinstance(link, LeaseReader)] if self.polls_endpoints else []
        if not endpoints:
            return None
        newest = max(link.opened_at for link in endpoints)
        busy = self._granted or time.monotonic() - newest < self.handshake_seconds
        return POLL_SECONDS if busy else IDLE_SECONDS


OPENING_SECONDS = 0.002
"""Poll interval while a library connects to a peer."""
POLL_SECONDS = 0.0005
"""Poll interval of endpoints while peers have grants, or soon after an endpoint was opened."""
IDLE_SECONDS = 0.05
"""Poll interval of endpoints at other times."""


class LeaseReader(IncomingLink):
    """The pool owner's end of a lease."""

    def __init__(
        self, stream: Stream, backend: LeasedBackend, slabs: Slabs | None, receive_buffers: ReceiveBuffers
    ) -> None:
        super().__init__(stream)
        self.opened_at = 0.0
        self._backend = backend
        self._endpoint: Endpoint | None = None
        self._slabs = None if slabs is None else SlabReader(self, receive_buffers, slabs, backend.stall_seconds)

    def welcome(self) -> bytes:
        self._endpoint = self._backend.endpoint()
        return self._backend.info_of(self._endpoint)

    def opened(self) -> None:
        self.opened_at = time.monotonic()
        if self._slabs is None:
            expect_end(self.stream)
        else:
            self._slabs.read()

    def look(self) -> None:
        """Let the library process writes that have arrived, and answer those that filled slabs.

        Raises ``LinkLost``, also if a batch for the slabs has waited too long for a grant.
        """
        if self._endpoint is not None:
            self._endpoint.look()
        if self._slabs is not None:
            self._slabs.look()

    def granted(self) -> None:
        """Continue the writes that wait for a grant, as far as they are granted by now."""
        if self._slabs is not None:
            self._slabs.granted()

    def next_slab(self, staged: StagedWrite) -> None:
        """Give the next slab to the write ``staged``, which is the first of those that wait for one."""
        if self._slabs is not None:
            self._slabs.next_slab(staged, in_turn=True)

    def is_writing(self, writer: Writer) -> bool:
        """Return whether pages of the hand-over ``writer`` may be under way through slabs of this link."""
        return self._slabs is not None and self._slabs.is_writing(writer)

    def stalled_at(self) -> float | None:
        return None if self._slabs is None else self._slabs.stalled_at()

    def closed(self, reason: str) -> None:
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.close()
        if self._slabs is not None:
            self._slabs.close()


class LeaseWriter(OutgoingLink):
    """The writer's end of a lease."""

    def __init__(self, stream: Stream, offer: Offer, backend: LeasedBackend) -> None:
        super().__init__(stream, offer)
        self.lands_on_device = False
        self._backend = backend
        self._initiator: Initiator | None = None
        self._slabs: SlabWriter | None = None
        self._under_way: deque[tuple[WriteHandle, Any]] = deque()
        self._not_taken: list[WriteHandle] = []

    def welcomed(self, means: bytes) -> None:
        self._initiator, endpoint = self._backend.initiator_to(self.offer, means)
        self.lands_on_device = endpoint.device is not None
        if endpoint.slab_bytes:
            self._slabs = SlabWriter(
                self, self._initiator, self._backend.groups, endpoint.addresses[0], endpoint.slab_bytes
            )
            self._slabs.read()
        else:
            expect_end(self.stream)

    def is_ready(self) -> bool:
        assert self._initiator is not None
        return self._initiator.is_ready()

    def write(self, pages: PageWrite) -> WriteHandle:
        assert self._initiator is not None
        if not self._is_writing:
            self.stream.last_progress = time.monotonic()  # the stall limit counts from this write
        if self._slabs is not None:
            return self._slabs.write(pages)
        handle = WriteHandle()
        try:
            self._under_way.append((handle, self._initiator.start(pages)))
        except LinkLost as e:
            # The link must end, but not within this call: its caller has no handle yet.
            handle.state, handle.error = WriteState.LOST, str(e)
            self._not_taken.append(handle)
        return handle

    def look(self) -> None:
        """Mark the writes that have arrived in the peer's memory as done. Raises ``LinkLost`` if one has failed."""
        assert self._initiator is not None
        if self._slabs is not None:
            self._slabs.look()
        left = deque[tuple[WriteHandle, Any]]()
        for handle, write in self._under_way:
            if self._initiator.has_landed(write):
                handle.state = WriteState.DONE
                self.stream.last_progress = time.monotonic()
            else:
                left.append((handle, write))
        self._under_way = left

    @property
    def _is_writing(self) -> bool:
        return bool(self._under_way) or (self._slabs is not None and self._slabs.under_way)

    def stalled_at(self) -> float | None:
        return self.stream.last_progress + self._backend.stall_seconds if self._is_writing else None

    def closed(self, reason: str) -> None:
        for handle in (*(handle for handle, _ in self._under_way), *self._not_taken):
            handle.state, handle.error = WriteState.FAILED, handle.error or reason
        self._under_way.clear()
        self._not_taken.clear()
        if self._slabs is not None:
            self._slabs.close(reason)
        initiator, self._initiator = self._initiator, None
        if initiator is not None:
            initiator.close()
