"""Messages on a lease about pages that move beside it: request, leave, written, landed.

    writer: requests a batch of pages ─▶ owner: checks the grants ─▶ leave to write some or all of them ─▶
    (they are written) ─▶ writer: written ─▶ owner: leave for the next ones | landed

The users of this module decide where the pages are written: to slabs of host memory (``leased_slabs.py``) or to the
pool itself (``ipc_links.py``). Several batches may be under way at a time.
"""

from __future__ import annotations

import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, Protocol

import numpy as np

from ....mem_cache.kv_pages.page_group import LayerRange, PageGroup
from ...errors import BadPages, LinkLost
from ..page_write import PageWrite, check_pages
from .base import WriteHandle, WriteState
from .grants import Writer
from .link import Link
from .receive_buffers import MAX_BATCH_BYTES, MAX_PAGES, PAGE_NUMBER, Batch, ReceiveBuffers

WRITER_MESSAGE = struct.Struct("<BQQQHHHI")
"""The writer's message: kind and batch; for a request also hand-over, group, layers and number of pages.

The page numbers of a request follow.
"""
OWNER_MESSAGE = struct.Struct("<BQQI")
"""The owner's message: kind and batch; for a leave also the offset (of a slab) and the number of pages."""
MAX_REQUESTS = 1024
"""Maximum number of batches under way on a link. An honest writer's engine requests far fewer."""


class LeaseMessage(IntEnum):
    """Kind of a message on a lease."""

    REQUEST = 1
    WRITTEN = 2
    SLAB = 3
    LANDED = 4
    REFUSED = 5
    POOL = 6
    MAPS = 7


class WriteRequestReader(ABC):
    """The pool owner's end of one link, which takes write requests and begins those that are granted."""

    def __init__(self, link: Link, receive_buffers: ReceiveBuffers, stall_seconds: float) -> None:
        self._link = link
        self._receive_buffers = receive_buffers
        self._stall_seconds = stall_seconds
        self._word = bytearray(WRITER_MESSAGE.size)
        self._ungranted: dict[int, Batch] = {}
        self._begun: dict[int, Batch] = {}

    @abstractmethod
    def _begin(self, batch: Batch) -> None:
        """Tell the writer where to write a granted batch, now or when its turn for a slab comes."""

    @abstractmethod
    def _on_written(self, batch: Batch) -> bool:
        """Handle the writer's report that it has written the part of ``batch`` it last had leave for.

        Return True if the whole batch is in the pool now.
        Otherwise have the writer given leave for the next part, and return False.
        Raises ``LinkLost`` if the writer broke the protocol, or does not read its answers.
        """

    @property
    @abstractmethod
    def _is_waiting_for_writer(self) -> bool:
        """Whether the writer was told to write something and has not reported that it is written."""

    def read(self) -> None:
        """Have the writer's next message read and handled when it arrives; return at once."""
        self._link.stream.read([memoryview(self._word)], self._on_word)

    def is_writing(self, writer: Writer) -> bool:
        """Return whether pages of the hand-over ``writer`` may be under way."""
        return any(batch.writer == writer for batch in self._begun.values())

    def stalled_at(self) -> float | None:
        """Return the ``time.monotonic()`` at which the link counts as stalled, or None while the writer owes nothing.

        It owes something while a batch waits for a grant, or may be written and is not reported as written.
        """
        owes = self._ungranted or self._is_waiting_for_writer
        return self._link.stream.last_progress + self._stall_seconds if owes else None

    def granted(self) -> None:
        """Begin those batches that waited for a grant and that their hand-overs may write by now."""
        for number, batch in list(self._ungranted.items()):
            if batch.is_granted:
                self._begun[number] = self._ungranted.pop(number)
                self._begin(batch)

    def look(self) -> None:
        """Raise ``LinkLost`` if a batch has waited too long for a grant."""
        late = self._link.stream.last_progress + self._stall_seconds < time.monotonic()
        if self._ungranted and late:
            raise LinkLost("the peer wants to write pages that it was not asked for")

    def close(self) -> None:
        """Drop all batches, because the link has ended and nothing is written any more."""
        self._begun.clear()
        self._ungranted.clear()

    def _give_leave(self, kind: LeaseMessage, batch: Batch, place: int, count: int) -> None:
        """Tell the writer to write the next ``count`` pages of ``batch``.

        ``kind``: SLAB, into the slabs at offset ``place`` in bytes, or POOL, where they belong in the pool.
        """
        self._say(kind, batch.number, place, count)
        self._link.stream.last_progress = time.monotonic()  # the stall limit counts from this leave

    def _on_word(self) -> None:
        kind, number, room, attempt, group, begin, end, count = WRITER_MESSAGE.unpack(self._word)
        if kind == LeaseMessage.WRITTEN:
            self._on_written_word(number)
            return
        known = len(self._ungranted) + len(self._begun)
        is_new = known < MAX_REQUESTS and number not in self._ungranted and number not in self._begun
        if (
            kind != LeaseMessage.REQUEST
            or not is_new
            or not 0 < count <= MAX_PAGES
            or group >= len(self._receive_buffers.pools)
        ):
            raise LinkLost("the peer sent a malformed batch")
        pool, layers = self._receive_buffers.pools[group], LayerRange(begin, end)
        if not begin < end <= pool.group.num_layers or count * pool.group.piece_bytes(layers) > MAX_BATCH_BYTES:
            raise LinkLost("the peer sent a malformed batch")
        table = bytearray(count * PAGE_NUMBER.itemsize)
        writer = Writer(self._link.peer, room, attempt)
        batch = Batch(number, writer, pool, layers, np.frombuffer(table, PAGE_NUMBER))
        self._link.stream.read([memoryview(table)], lambda: self._on_pages(batch))

    def _on_pages(self, batch: Batch) -> None:
        self.read()
        try:
            check_pages(batch.pages, batch.pool.group.num_pages, "destination")
        except BadPages:
            self._say(LeaseMessage.REFUSED, batch.number)
            return
        self._ungranted[batch.number] = batch
        self.granted()

    def _on_written_word(self, number: int) -> None:
        self.read()
        if number not in self._begun:
            raise LinkLost("the peer wrote what it had no leave for")
        if self._on_written(self._begun[number]):
            del self._begun[number]
            self._say(LeaseMessage.LANDED, number)

    def _say(self, kind: LeaseMessage, number: int, place: int = 0, count: int = 0) -> None:
        if self._link.stream.queued >= MAX_REQUESTS:
            raise LinkLost("the peer does not read its answers")
        self._link.stream.send([OWNER_MESSAGE.pack(kind, number, place, count)])


@dataclass(slots=True)
class WriteRequest:
    """A write that is under way."""

    handle: WriteHandle
    pages: PageWrite
    at: int = 0
    """Number of pages that are written."""
    count: int = 0
    """Number of pages that the latest leave covers."""
    writing: Any = None
    """Argument of ``Mover.has_landed`` for the pages that are being written, None without any."""


class Mover(Protocol):
    """Interface to the object that moves the bytes."""

    def has_landed(self, write: Any) -> bool:
        """Return whether every byte of ``write`` has arrived in the peer's memory; never wait. Raises ``LinkLost``."""
        ...


class WriteRequestWriter(ABC):
    """The writer's end of one link. ``leave``: kind of the leave that the pool's owner gives."""

    leave: ClassVar[LeaseMessage]

    def __init__(self, link: Link, mover: Mover, groups: Sequence[PageGroup]) -> None:
        self._link = link
        self._mover = mover
        self._groups = groups
        self._note = bytearray(OWNER_MESSAGE.size)
        self._write_requests: dict[int, WriteRequest] = {}
        self._next = 0

    @abstractmethod
    def _start(self, request: WriteRequest, place: int, count: int) -> Any:
        """Begin to write the request's next ``count`` pages to ``place``, the offset that the owner named.

        Return a token for ``Mover.has_landed``. Raises ``LinkLost``.
        """

    @property
    def under_way(self) -> bool:
        """Whether any write is under way."""
        return bool(self._write_requests)

    def read(self) -> None:
        """Have the owner's next message read and handled when it arrives; return at once."""
        self._link.stream.read([memoryview(self._note)], self._on_note)

    def write(self, pages: PageWrite) -> WriteHandle:
        """Ask the pool's owner to let a batch of pages be written, and return the handle of the write.

        Bytes move once the owner agrees. Raises ``BadPages`` if the batch has too many pages or bytes.
        """
        group = self._groups[pages.group]
        total = len(pages.dst) * group.piece_bytes(pages.layers)
        if len(pages.dst) > MAX_PAGES or total > MAX_BATCH_BYTES:
            raise BadPages(f"a batch of {len(pages.dst)} pages and {total} bytes is too large")
        if not self._write_requests:
            self._link.stream.last_progress = time.monotonic()  # the stall limit counts from this request
        handle = WriteHandle()
        self._write_requests[self._next] = WriteRequest(handle, pages)
        room, attempt = pages.handover.room, pages.handover.attempt
        word = WRITER_MESSAGE.pack(
            LeaseMessage.REQUEST, self._next, room, attempt, pages.group, *pages.layers, len(pages.dst)
        )
        self._link.stream.send([word + pages.dst.astype(PAGE_NUMBER).tobytes()])
        self._next += 1
        return handle

    def look(self) -> None:
        """Report the pages that have been written to the owner. Raises ``LinkLost`` if a write has failed."""
        for number, request in self._write_requests.items():
            if request.writing is not None and self._mover.has_landed(request.writing):
                request.writing = None
                request.at += request.count
                self._link.stream.send([WRITER_MESSAGE.pack(LeaseMessage.WRITTEN, number, 0, 0, 0, 0, 0, 0)])

    def close(self, reason: str) -> None:
        """Mark all writes as failed: the link has ended, for ``reason``."""
        for request in self._write_requests.values():
            request.handle.state, request.handle.error = WriteState.FAILED, reason
        self._write_requests.clear()

    def _on_note(self) -> None:
        kind, number, place, count = OWNER_MESSAGE.unpack(self._note)
        self.read()
        request = self._write_requests.get(number)
        if request is None or request.writing is not None:
            raise LinkLost("the peer speaks of a batch that was not sent")
        if kind == self.leave:
            if not 0 < count <= len(request.pages.src) - request.at:
                raise LinkLost("the peer gives leave for pages that were not requested")
            request.count = count
            request.writing = self._start(request, place, count)
            return
        is_whole = request.at == len(request.pages.dst)
        if not (kind == LeaseMessage.REFUSED or (kind == LeaseMessage.LANDED and is_whole)):
            raise LinkLost("the peer says what has no meaning here")
        del self._write_requests[number]
        request.handle.state = WriteState.DONE if kind == LeaseMessage.LANDED else WriteState.FAILED
        request.handle.error = "" if kind == LeaseMessage.LANDED else "the peer has no such pages"
