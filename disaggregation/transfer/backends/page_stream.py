"""Transfer of KV pages as bytes of a connection, between pools that neither end maps.

After the handshake the writer sends batches and the receiver answers each, in order, when it has landed:

    batch: header (id, hand-over, group, layers, number of pages), the receiver's pages, then their bytes
    answer: id, whether the pool has these pages (otherwise their bytes are discarded)

Bytes for pages that the hand-over was not granted are not read. If the grant doesn't come, the link ends.

For pools in host memory, bytes go between pool and socket without a copy. Pages of a pool on a device (``staging.py``)
pass through slabs of host memory, one at a time. They have landed when they are on the device. While no slab is free
nothing is read, so the connection itself slows the writer down.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from ....mem_cache.kv_pages.page_group import LayerRange, PageGroup
from ....messages.base import I32, HandoverId
from ...errors import BadPages, LinkLost
from ...wire.stream import Stream
from ..page_checksums import PageChecksums
from ..page_write import PageWrite, check_pages, paired_spans
from .base import WriteHandle, WriteState
from .grants import Writer
from .handshake import Offer
from .link import IncomingLink, OutgoingLink
from .receive_buffers import MAX_BATCH_BYTES, MAX_PAGES, PAGE_NUMBER, Batch, ReceiveBuffers, StagedWrite
from .socket_backend import SocketBackend

BATCH = struct.Struct("<QQQHHHI")
ANSWER = struct.Struct("<QB")
DISCARD_BYTES = 256 << 10
MAX_UNREAD_ANSWERS = 4096
"""An honest writer reads the answer to a batch before it sends dozens more."""


class StreamBackend(SocketBackend):
    """Base class of backends that send pages over connections, with write permissions for each hand-over.

    ``streams``: whether this backend receives any pages that way.
    """

    streams = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._receive_buffers = ReceiveBuffers(())

    def register(self, groups: Sequence[PageGroup]) -> bytes:
        metadata = super().register(groups)
        if self.streams:
            self._receive_buffers = ReceiveBuffers(groups)
        return metadata

    def note_checksums_in(self, peer: str, handover: HandoverId, landed: PageChecksums) -> None:
        self._receive_buffers.note(peer, handover, landed)

    def grant(self, peer: str, handover: HandoverId, pages: I32, group: int = 0) -> None:
        if not self.streams:
            return
        self._receive_buffers.grant(peer, handover, pages, group)
        # Control messages and grants take different paths, so a peer's pages may arrive before its grant.
        for link in [k for k in self._links if isinstance(k, StreamReader) and k.peer == peer and k.paused]:
            link.granted()
            self._rewatch(link)

    def revoke(self, peer: str, handover: HandoverId) -> None:
        writer = self._receive_buffers.revoke(peer, handover)
        for link in [k for k in self._links if isinstance(k, StreamReader) and k.reading == writer]:
            self._lost(link, "the peer was still writing pages that it may not write any more")

    def close(self) -> None:
        super().close()
        self._receive_buffers.close()

    def _reader(self, stream: Stream) -> StreamReader:
        return StreamReader(stream, self._receive_buffers, self.stall_seconds)

    def _advance(self) -> None:
        """Give free slabs to the writes that wait for one, in order, so that their links continue to read.

        Slabs become free by I/O or with the end of a link. The event of that end keeps the next tick from waiting.
        """
        while (turn := self._receive_buffers.next_in_line()) is not None:
            link, staged = turn
            assert isinstance(link, StreamReader)
            link.next_slab(staged, in_turn=True)
            self._rewatch(link)


class StreamWriter(OutgoingLink):
    """The writer's end."""

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
            self.stream.last_progress = time.monotonic()  # the stall limit counts from this write
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


class StreamReader(IncomingLink):
    """The pool owner's end. ``reading``: the hand-over with bytes that may be under way into the pool."""

    def __init__(self, stream: Stream, receive_buffers: ReceiveBuffers, stall_seconds: float) -> None:
        super().__init__(stream)
        self._receive_buffers = receive_buffers
        self._staged: StagedWrite | None = None
        self._stall_seconds = stall_seconds
        self._header = bytearray(BATCH.size)
        self._in_batch = False
        self._discard = memoryview(b"")
        self._ungranted: Batch | None = None
        self.reading: Writer | None = None

    def opened(self) -> None:
        self._read_header()

    def stalled_at(self) -> float | None:
        waits_for_us = self._waits_for_slab
        return self.stream.last_progress + self._stall_seconds if self._in_batch and not waits_for_us else None

    def closed(self, reason: str) -> None:
        staged, self._staged = self._staged, None
        self._receive_buffers.leave(self)
        if staged is not None:
            staged.drop()

    def _read_header(self) -> None:
        self._in_batch, self.reading = False, None
        self.stream.read([memoryview(self._header)], self._on_header)

    def _on_header(self) -> None:
        number, room, attempt, group, begin, end, count = BATCH.unpack(self._header)
        if not 0 < count <= MAX_PAGES or group >= len(self._receive_buffers.pools):
            raise LinkLost("the peer sent a malformed batch")
        pool, layers = self._receive_buffers.pools[group], LayerRange(begin, end)
        if not begin < end <= pool.group.num_layers or count * pool.group.piece_bytes(layers) > MAX_BATCH_BYTES:
            raise LinkLost("the peer sent a malformed batch")
        self._in_batch = True
        table = bytearray(count * PAGE_NUMBER.itemsize)
        batch = Batch(number, Writer(self.peer, room, attempt), pool, layers, np.frombuffer(table, PAGE_NUMBER))
        self.stream.read([memoryview(table)], lambda: self._on_pages(batch))

    def _on_pages(self, batch: Batch) -> None:
        try:
            check_pages(batch.pages, batch.pool.group.num_pages, "destination")
        except BadPages:
            self.stream.read(self._to_discard(batch.nbytes), lambda: self._on_payload(batch.number, landed=False))
            return
        self._ungranted = batch
        self.granted()

    @property
    def paused(self) -> bool:
        return self._ungranted is not None or self._waits_for_slab

    @property
    def _waits_for_slab(self) -> bool:
        return self._staged is not None and self._staged.slab is None

    def granted(self) -> None:
        """Read the pages of the batch that waits for its grant, if it is granted by now; otherwise pause the
        connection.
        """
        batch = self._ungranted
        if batch is None:
            return
        if not batch.is_granted:
            self.stream.pause()
            return
        self._ungranted, self.reading = None, batch.writer
        group = batch.pool.group
        if group.staging is not None:
            self._staged = self._receive_buffers.staged(batch)
            self.next_slab(self._staged)
            return
        spans = group.spans(batch.pages, batch.layers)
        views = (batch.pool.memory[offset : offset + length] for offset, length in spans.tolist())
        self.stream.read(views, lambda: self._on_payload(batch.number, landed=True))

    def next_slab(self, staged: StagedWrite, *, in_turn: bool = False) -> None:
        """Read as many pages of a staged batch as a slab takes, or pause the connection until a slab is free.

        ``in_turn``: the batch is the first of those that wait.
        """
        slab = self._receive_buffers.take_slab(self, staged, in_turn=in_turn)
        if slab is None:
            self.stream.pause()
            return
        self.stream.last_progress = time.monotonic()  # the stall limit counts from this read
        self.stream.read([staged.filled(slab)], lambda: self._on_slab(staged, slab))

    def _on_slab(self, staged: StagedWrite, slab: memoryview) -> None:
        if not staged.land(slab):
            self.next_slab(staged)
            return
        self._staged = None
        self._on_payload(staged.batch.number, landed=True)

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
