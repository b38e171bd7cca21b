"""KV pages over TCP: works between any two hosts, needs nothing.

After the handshake the writer sends batches and the receiver answers each, in order, when it has landed:

    batch: header (number of spans, id, bytes), spans of the receiver's pool (offset, length), then their bytes
    answer: id, whether the spans were inside the pool (their bytes are thrown away otherwise)

Bytes for pages that the writer was not granted are not read; where the grant doesn't come, the link ends.

Bytes go from the pool to the socket and from the socket to the pool with nothing in between. A peer that died
is noticed by the connection's end; one that is silent in the middle of a batch, by ``stall_seconds``; an idle peer
whose host vanished, by TCP keep-alive.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ....messages.base import I32
from ....runtime.web.ports import is_loopback
from ...errors import BadMetadata, BadSpans, LinkLost, RegionError
from ...wire import tcp_socket
from ...wire.listener import BACKLOG
from ...wire.stream import Stream
from ..region import KVRegion
from .base import Spans, WriteHandle, WriteState, check_spans
from .grants import Grants
from .handshake import Offer
from .link import IncomingLink, OutgoingLink
from .socket_backend import SocketBackend

BATCH = struct.Struct("<IQQ")
ANSWER = struct.Struct("<QB")
SPAN_BYTES = 16
MAX_SPANS = 1 << 16
MAX_BATCH_BYTES = 1 << 30
BUFFER_BYTES = 4 << 20
DISCARD_BYTES = 256 << 10
MAX_UNREAD_ANSWERS = 4096
"""An honest writer reads the answer to a batch before it sends dozens more."""


class TcpBackend(SocketBackend):
    """See the module; ``host`` is the address to listen on, and to be reached at unless ``advertise_host`` is."""

    name = "tcp"
    checks_grants = True

    def _listen(self, region: KVRegion) -> tuple[socket.socket, Offer]:
        family, _, _, _, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            # Connections of the last life that are still closing don't keep the port.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            set_buffers(sock)  # before connections exist: the window scale is fixed by the handshake
            sock.bind(address)
            sock.listen(BACKLOG)
        except OSError:
            sock.close()
            raise
        place, port = sock.getsockname()[:2]
        if self.advertise_host is not None:
            return sock, self._offer(advertised_address(self.advertise_host, sock), port)
        return sock, self._offer(reachable_address(place), port)

    def _dial(self, offer: Offer) -> OutgoingLink:
        sock = socket.socket(address_family(offer), socket.SOCK_STREAM)
        try:
            set_buffers(sock)
            self._tune(sock)
            tcp_socket.start_connecting(sock, offer.place, offer.port)
        except OSError:
            sock.close()
            raise
        return _TcpWriter(Stream(sock), offer, self.pool, self.page_bytes, self.stall_seconds)

    def _unreachable(self, offer: Offer, reason: str) -> str:
        hint = (
            "it offers a loopback address: start it with a --host that this host can reach"
            if ipaddress.ip_address(offer.place).is_loopback
            else "check that it runs, and that its --host and firewall let this host in"
        )
        return f"can't reach the KV data port of peer {offer.epoch} at {offer.place}:{offer.port}: {reason}; {hint}"

    def _accepted(self, sock: socket.socket) -> IncomingLink:
        self._tune(sock)
        return _TcpReader(Stream(sock), self.pool, self.page_bytes, self.stall_seconds, self._grants)

    def register(self, region: KVRegion, page_bytes: int) -> bytes:
        metadata = super().register(region, page_bytes)
        self._grants = Grants(region.nbytes // page_bytes, page_bytes)
        return metadata

    def grant(self, peer: str, pages: I32) -> None:
        self._grants.grant(peer, pages)
        # Control messages and grants take different ways here: a peer may be quicker than its grant.
        for link in [k for k in self._links if isinstance(k, _TcpReader) and k.peer == peer and k.paused]:
            link.granted()
            self._rewatch(link)

    def revoke(self, pages: I32) -> None:
        self._grants.revoke(pages)
        for link in [k for k in self._links if isinstance(k, _TcpReader) and k.writes(pages)]:
            self._lost(link, "the peer was still writing pages that it may not write any more")

    def _tune(self, sock: socket.socket) -> None:
        tcp_socket.tune(sock, self.stall_seconds)


class _TcpWriter(OutgoingLink):
    def __init__(self, stream: Stream, offer: Offer, pool: memoryview, page_bytes: int, stall_seconds: float) -> None:
        super().__init__(stream, offer)
        self._pool = pool
        self._page_bytes = page_bytes
        self._stall_seconds = stall_seconds
        self._answer = bytearray(ANSWER.size)
        self._unanswered: deque[tuple[int, WriteHandle]] = deque()
        self._next_id = 0

    def opened(self) -> None:
        self._read_answer()

    def write(self, local: Spans, remote: Spans) -> WriteHandle:
        check_spans(remote, self.offer.nbytes, f"pool of peer {self.peer}", self._page_bytes)
        total = int(remote[:, 1].sum())
        if len(remote) > MAX_SPANS or total > MAX_BATCH_BYTES:
            raise BadSpans(f"a batch of {len(remote)} spans and {total} bytes is too large")
        handle = WriteHandle()
        if not self._unanswered:
            self.stream.last_progress = time.monotonic()  # silence before this was nobody's fault
        self._unanswered.append((self._next_id, handle))
        header = BATCH.pack(len(remote), self._next_id, total)
        self.stream.send([header + remote.astype("<i8").tobytes()])
        self.stream.send(self._pool[offset : offset + length] for offset, length in local.tolist())
        self._next_id += 1
        return handle

    def stalled_at(self) -> float | None:
        return self.stream.last_progress + self._stall_seconds if self._unanswered else None

    def closed(self, reason: str) -> None:
        for _, handle in self._unanswered:
            handle.state = WriteState.FAILED
            handle.error = reason
        self._unanswered.clear()

    def _read_answer(self) -> None:
        self.stream.read([memoryview(self._answer)], self._on_answer)

    def _on_answer(self) -> None:
        number, landed = ANSWER.unpack(self._answer)
        if not self._unanswered or self._unanswered[0][0] != number:
            raise LinkLost("the peer answered a batch that was not sent")
        handle = self._unanswered.popleft()[1]
        handle.state = WriteState.DONE if landed else WriteState.FAILED
        handle.error = "" if landed else "the peer refused pages outside of its pool"
        self._read_answer()


class _Batch(NamedTuple):
    """Pages that a peer wants to write."""

    spans: Spans
    number: int


class _TcpReader(IncomingLink):
    def __init__(self, stream: Stream, pool: memoryview, page_bytes: int, stall_seconds: float, grants: Grants) -> None:
        super().__init__(stream)
        self._pool = pool
        self._page_bytes = page_bytes
        self._stall_seconds = stall_seconds
        self._grants = grants
        self._header = bytearray(BATCH.size)
        self._in_batch = False
        self._discard = memoryview(b"")
        self._ungranted: _Batch | None = None
        self._reading: Spans | None = None

    def opened(self) -> None:
        self._read_header()

    def stalled_at(self) -> float | None:
        return self.stream.last_progress + self._stall_seconds if self._in_batch else None

    def writes(self, pages: I32) -> bool:
        """Whether bytes for any of ``pages`` may be under way."""
        return self._reading is not None and bool(np.isin(self._grants.pages(self._reading), pages).any())

    def _read_header(self) -> None:
        self._in_batch, self._reading = False, None
        self.stream.read([memoryview(self._header)], self._on_header)

    def _on_header(self) -> None:
        count, number, total = BATCH.unpack(self._header)
        if not 0 < count <= MAX_SPANS or not 0 < total <= MAX_BATCH_BYTES:
            raise LinkLost("the peer sent a malformed batch")
        self._in_batch = True
        table = bytearray(count * SPAN_BYTES)
        self.stream.read([memoryview(table)], lambda: self._on_table(table, number, total))

    def _on_table(self, table: bytearray, number: int, total: int) -> None:
        spans = np.frombuffer(table, dtype="<i8").reshape(-1, 2)
        lengths = spans[:, 1]
        # Each length first: a sum of hostile ones can wrap around to the right total.
        if bool(((lengths <= 0) | (lengths > total)).any()) or int(lengths.sum()) != total:
            raise LinkLost("the peer sent a malformed batch")
        try:
            check_spans(spans, len(self._pool), "pool", self._page_bytes)
        except BadSpans:
            self.stream.read(self._to_discard(total), lambda: self._on_payload(number, landed=False))
            return
        self._ungranted = _Batch(spans, number)
        self.granted()

    @property
    def paused(self) -> bool:
        return self._ungranted is not None

    def granted(self) -> None:
        """Read the pages that wait for it, if they may be written by now."""
        if self._ungranted is None:
            return
        if not self._grants.covers(self.peer, self._ungranted.spans):
            self.stream.pause()
            return
        (spans, number), self._ungranted = self._ungranted, None
        self._reading = spans
        views = (self._pool[offset : offset + length] for offset, length in spans.tolist())
        self.stream.read(views, lambda: self._on_payload(number, landed=True))

    def _to_discard(self, total: int) -> list[memoryview]:
        if not self._discard:
            self._discard = memoryview(bytearray(DISCARD_BYTES))
        whole, rest = divmod(total, DISCARD_BYTES)
        return [self._discard] * whole + ([self._discard[:rest]] if rest else [])

    def _on_payload(self, number: int, *, landed: bool) -> None:
        if self.stream.queued >= MAX_UNREAD_ANSWERS:
            raise LinkLost("the peer does not read its answers")
        self.stream.send([ANSWER.pack(number, landed)])
        self._read_header()


def address_family(offer: Offer) -> socket.AddressFamily:
    """Family of the offered address; raises ``BadMetadata`` for a name, whose look-up could block."""
    try:
        return tcp_socket.address_family(offer.place)
    except ValueError as e:
        raise BadMetadata(f"peer {offer.epoch} offers {offer.place!r}, which is no IP address") from e


def reachable_address(bound: str) -> str:
    """The address that peers can use for a socket bound to ``bound``, which may be "any"."""
    address = ipaddress.ip_address(bound)
    if not address.is_unspecified:
        return bound
    # Which of our addresses leads outwards? Connecting a UDP socket asks the routing table and sends nothing.
    family, outside = (socket.AF_INET6, "2001:db8::1") if address.version == 6 else (socket.AF_INET, "192.0.2.1")
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((outside, 9))
        except OSError:
            return "::1" if address.version == 6 else "127.0.0.1"  # no way out of this host
        return str(sock.getsockname()[0])


def advertised_address(name: str, listener: socket.socket) -> str:
    """The address of ``name``, of the listener's family; looked up here, since who connects must not wait for that.

    Raises ``RegionError`` where it is none, or one of this host alone.
    """
    try:
        found = socket.getaddrinfo(name, None, family=listener.family, type=socket.SOCK_STREAM)
    except OSError as e:
        listener.close()
        raise RegionError(f"--advertise-host {name}: {e.strerror}; give an address, or a name that has one") from e
    address = str(found[0][4][0])
    if is_loopback(address) and not is_loopback(str(listener.getsockname()[0])):
        listener.close()
        raise RegionError(
            f"--advertise-host {name} is {address} here, which others don't reach: give the address itself"
        )
    return address


def set_buffers(sock: socket.socket) -> None:
    """Ask for large buffers where the system grants them: a smaller grant would switch off its own growing ones."""
    for option, name in ((socket.SO_SNDBUF, "wmem_max"), (socket.SO_RCVBUF, "rmem_max")):
        limit = Path("/proc/sys/net/core", name)
        if limit.exists() and int(limit.read_text()) >= BUFFER_BYTES:
            sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
