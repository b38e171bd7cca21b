"""KV pages over TCP: works between any two hosts, needs nothing.

After the handshake the writer sends batches and the receiver answers each, in order, when it has landed:

    batch: header (id, hand-over, group, layers, number of pages), the receiver's pages, then their bytes
    answer: id, whether the pool has these pages (their bytes are thrown away otherwise)

Bytes for pages that the hand-over was not granted are not read; where the grant doesn't come, the link ends.

Bytes go from the pool to the socket and from the socket to the pool with nothing in between. A peer that died
is noticed by the connection's end; one that is silent in the middle of a batch, by ``stall_seconds``; an idle peer
whose host vanished, by TCP keep-alive.
"""

from __future__ import annotations

import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ....messages.base import I32, HandoverId
from ...errors import BadPages, LinkLost
from ...wire import tcp_socket
from ...wire.stream import Stream
from ..pages import LayerRange, PageGroup, PageWrite, check_pages, paired_spans
from . import tcp_place
from .base import Capabilities, WriteHandle, WriteState
from .grants import Grants, Writer
from .handshake import Offer
from .link import IncomingLink, OutgoingLink
from .socket_backend import SocketBackend

BATCH = struct.Struct("<QQQHHHI")
ANSWER = struct.Struct("<QB")
PAGE_NUMBER = np.dtype("<i4")
MAX_PAGES = 1 << 16
MAX_BATCH_BYTES = 1 << 30
BUFFER_BYTES = 4 << 20
DISCARD_BYTES = 256 << 10
MAX_UNREAD_ANSWERS = 4096
"""An honest writer reads the answer to a batch before it sends dozens more."""


class TcpBackend(SocketBackend):
    """See the module; ``host`` is the address to listen on, and to be reached at unless ``advertise_host`` is."""

    name = "tcp"
    can = Capabilities(checks_grants=True)

    def _listen(self) -> tuple[socket.socket, Offer]:
        # Buffers before connections exist: the window scale is fixed by the handshake.
        sock, place, port = tcp_place.listen(self.host, self.port, self.advertise_host, set_buffers)
        return sock, self._offer(place, port)

    def _dial(self, offer: Offer) -> OutgoingLink:
        sock = tcp_place.dial(offer, self._tune)
        return _TcpWriter(Stream(sock), offer, self.groups, self.stall_seconds)

    def _unreachable(self, offer: Offer, reason: str) -> str:
        return tcp_place.unreachable(offer, reason)

    def _accepted(self, sock: socket.socket) -> IncomingLink:
        self._tune(sock)
        return _TcpReader(Stream(sock), self._pools, self.stall_seconds)

    def register(self, groups: Sequence[PageGroup]) -> bytes:
        metadata = super().register(groups)
        self._pools = [_Pool(group, group.region.view(), Grants(group.num_pages)) for group in groups]
        return metadata

    def grant(self, peer: str, handover: HandoverId, pages: I32, group: int = 0) -> None:
        self._pools[group].grants.grant(Writer(peer, handover.room, handover.attempt), pages)
        # Control messages and grants take different ways here: a peer may be quicker than its grant.
        for link in [k for k in self._links if isinstance(k, _TcpReader) and k.peer == peer and k.paused]:
            link.granted()
            self._rewatch(link)

    def revoke(self, peer: str, handover: HandoverId) -> None:
        writer = Writer(peer, handover.room, handover.attempt)
        for pool in self._pools:
            pool.grants.revoke(writer)
        for link in [k for k in self._links if isinstance(k, _TcpReader) and k.reading == writer]:
            self._lost(link, "the peer was still writing pages that it may not write any more")

    def close(self) -> None:
        super().close()
        for pool in self._pools:
            pool.memory.release()

    def _tune(self, sock: socket.socket) -> None:
        set_buffers(sock)
        tcp_socket.tune(sock, self.stall_seconds)


class _Pool(NamedTuple):
    """A group of pages that peers write."""

    group: PageGroup
    memory: memoryview
    grants: Grants


class _TcpWriter(OutgoingLink):
    def __init__(self, stream: Stream, offer: Offer, groups: Sequence[PageGroup], stall_seconds: float) -> None:
        super().__init__(stream, offer)
        self._groups = groups
        self._memory = [group.region.view() for group in groups]
        self._stall_seconds = stall_seconds
        self._answer = bytearray(ANSWER.size)
        self._unanswered: deque[tuple[int, WriteHandle]] = deque()
        self._next_id = 0

    def opened(self) -> None:
        self._read_answer()

    def write(self, pages: PageWrite) -> WriteHandle:
        group, memory = self._groups[pages.group], self._memory[pages.group]
        total = len(pages.dst) * group.piece_bytes(pages.layers)
        if len(pages.dst) > MAX_PAGES or total > MAX_BATCH_BYTES:
            raise BadPages(f"a batch of {len(pages.dst)} pages and {total} bytes is too large")
        handle = WriteHandle()
        if not self._unanswered:
            self.stream.last_progress = time.monotonic()  # silence before this was nobody's fault
        self._unanswered.append((self._next_id, handle))
        room, attempt = pages.handover.room, pages.handover.attempt
        header = BATCH.pack(self._next_id, room, attempt, pages.group, *pages.layers, len(pages.dst))
        self.stream.send([header + pages.dst.astype(PAGE_NUMBER).tobytes()])
        local, _ = paired_spans(pages, group)
        self.stream.send(memory[offset : offset + length] for offset, length in local.tolist())
        self._next_id += 1
        return handle

    def stalled_at(self) -> float | None:
        return self.stream.last_progress + self._stall_seconds if self._unanswered else None

    def closed(self, reason: str) -> None:
        for _, handle in self._unanswered:
            handle.state = WriteState.FAILED
            handle.error = reason
        self._unanswered.clear()
        for memory in self._memory:
            memory.release()

    def _read_answer(self) -> None:
        self.stream.read([memoryview(self._answer)], self._on_answer)

    def _on_answer(self) -> None:
        number, landed = ANSWER.unpack(self._answer)
        if not self._unanswered or self._unanswered[0][0] != number:
            raise LinkLost("the peer answered a batch that was not sent")
        handle = self._unanswered.popleft()[1]
        handle.state = WriteState.DONE if landed else WriteState.FAILED
        handle.error = "" if landed else "the peer has no such pages"
        self._read_answer()


class _Batch(NamedTuple):
    """Pages that a peer wants to write."""

    number: int
    writer: Writer
    pool: _Pool
    layers: LayerRange
    pages: npt.NDArray[np.int32]


class _TcpReader(IncomingLink):
    """``reading``: the hand-over whose bytes may be under way into the pool."""

    def __init__(self, stream: Stream, pools: Sequence[_Pool], stall_seconds: float) -> None:
        super().__init__(stream)
        self._pools = pools
        self._stall_seconds = stall_seconds
        self._header = bytearray(BATCH.size)
        self._in_batch = False
        self._discard = memoryview(b"")
        self._ungranted: _Batch | None = None
        self.reading: Writer | None = None

    def opened(self) -> None:
        self._read_header()

    def stalled_at(self) -> float | None:
        return self.stream.last_progress + self._stall_seconds if self._in_batch else None

    def _read_header(self) -> None:
        self._in_batch, self.reading = False, None
        self.stream.read([memoryview(self._header)], self._on_header)

    def _on_header(self) -> None:
        number, room, attempt, group, begin, end, count = BATCH.unpack(self._header)
        if not 0 < count <= MAX_PAGES or group >= len(self._pools):
            raise LinkLost("the peer sent a malformed batch")
        pool, layers = self._pools[group], LayerRange(begin, end)
        if not begin < end <= pool.group.num_layers or count * pool.group.piece_bytes(layers) > MAX_BATCH_BYTES:
            raise LinkLost("the peer sent a malformed batch")
        self._in_batch = True
        table = bytearray(count * PAGE_NUMBER.itemsize)
        batch = _Batch(number, Writer(self.peer, room, attempt), pool, layers, np.frombuffer(table, PAGE_NUMBER))
        self.stream.read([memoryview(table)], lambda: self._on_pages(batch))

    def _on_pages(self, batch: _Batch) -> None:
        group = batch.pool.group
        try:
            check_pages(batch.pages, group.num_pages, "destination")
        except BadPages:
            total = len(batch.pages) * group.piece_bytes(batch.layers)
            self.stream.read(self._to_discard(total), lambda: self._on_payload(batch.number, landed=False))
            return
        self._ungranted = batch
        self.granted()

    @property
    def paused(self) -> bool:
        return self._ungranted is not None

    def granted(self) -> None:
        """Read the pages that wait for it, if they may be written by now."""
        batch = self._ungranted
        if batch is None:
            return
        if not batch.pool.grants.covers(batch.writer, batch.pages):
            self.stream.pause()
            return
        self._ungranted, self.reading = None, batch.writer
        spans = batch.pool.group.spans(batch.pages, batch.layers)
        views = (batch.pool.memory[offset : offset + length] for offset, length in spans.tolist())
        self.stream.read(views, lambda: self._on_payload(batch.number, landed=True))

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


def set_buffers(sock: socket.socket) -> None:
    """Ask for large buffers where the system grants them: a smaller grant would switch off its own growing ones."""
    for option, name in ((socket.SO_SNDBUF, "wmem_max"), (socket.SO_RCVBUF, "rmem_max")):
        limit = Path("/proc/sys/net/core", name)
        if limit.exists() and int(limit.read_text()) >= BUFFER_BYTES:
            sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
