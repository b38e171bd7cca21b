"""What two ends of a lease say of pages that move beside it: requested for, allowed, written, landed.

    writer: the pages that it wants to write ─▶ owner: held against the grants ─▶ leave to write some or all of them ─▶
    (they are written) ─▶ writer: written ─▶ owner: leave for the next ones | landed

Where they are written to is for those who use this to say: slabs of the host's memory (``leased_slabs.py``), or the
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

from ...errors import BadPages, LinkLost
from ..pages import LayerRange, PageGroup, PageWrite, check_pages
from .base import WriteHandle, WriteState
from .grants import Writer
from .link import Link
from .receive_buffers import MAX_BATCH_BYTES, MAX_PAGES, PAGE_NUMBER, Batch, ReceiveBuffers

WORD = struct.Struct("<BQQQHHHI")
"""The writer's: kind, batch; and of a request hand-over, group, layers, number of pages, which follow."""
NOTE = struct.Struct("<BQQI")
"""The owner's: kind, batch; and of a leave the place (of a slab), and for how many pages it is."""
MAX_WISHES = 1024
"""Batches that may be under way by a link; an honest writer's engine asks for far fewer."""


class Kind(IntEnum):
    """What is said."""

    WISH = 1
    WRITTEN = 2
    SLAB = 3
    LANDED = 4
    REFUSED = 5
    POOL = 6
    MAPS = 7


class WriteRequestReader(ABC):
    """The owner's end of one link: takes write requests, and begins those that are granted."""

    def __init__(self, link: Link, receive_buffers: ReceiveBuffers, stall_seconds: float) -> None:
        self._link = link
        self._receive_buffers = receive_buffers
        self._stall_seconds = stall_seconds
        self._word = bytearray(WORD.size)
        self._ungranted: dict[int, Batch] = {}
        self._begun: dict[int, Batch] = {}

    @abstractmethod
    def _begin(self, batch: Batch) -> None:
        """It is granted: let the writer write, now or in its turn."""

    @abstractmethod
    def _on_written(self, batch: Batch) -> bool:
        """The writer has written what it might; returns whether all of the batch has landed. Raises ``LinkLost``."""

    @property
    @abstractmethod
    def _is_owed(self) -> bool:
        """Whether the writer has leave to write, and has yet to say that it is done."""

    def read(self) -> None:
        """Wait for what the writer says next."""
        self._link.stream.read([memoryview(self._word)], self._on_word)

    def is_writing(self, writer: Writer) -> bool:
        """Whether pages of a hand-over may be under way."""
        return any(batch.writer == writer for batch in self._begun.values())

    def stalled_at(self) -> float | None:
        """As ``Link.stalled_at``."""
        owes = self._ungranted or self._is_owed
        return self._link.stream.last_progress + self._stall_seconds if owes else None

    def granted(self) -> None:
        """Go on with what may be written by now."""
        for number, batch in list(self._ungranted.items()):
            if batch.is_granted:
                self._begun[number] = self._ungranted.pop(number)
                self._begin(batch)

    def look(self) -> None:
        """Raises ``LinkLost`` for who wants to write what nobody asked it for."""
        late = self._link.stream.last_progress + self._stall_seconds < time.monotonic()
        if self._ungranted and late:
            raise LinkLost("the peer wants to write pages that it was not asked for")

    def close(self) -> None:
        """Nothing is written any more."""
        self._begun.clear()
        self._ungranted.clear()

    def _give_leave(self, kind: Kind, batch: Batch, place: int, count: int) -> None:
        """Let the writer write its next ``count`` pages, ``place`` being where."""
        self._say(kind, batch.number, place, count)
        self._link.stream.last_progress = time.monotonic()  # silence before this was nobody's fault

    def _on_word(self) -> None:
        kind, number, room, attempt, group, begin, end, count = WORD.unpack(self._word)
        if kind == Kind.WRITTEN:
            self._on_written_word(number)
            return
        known = len(self._ungranted) + len(self._begun)
        is_new = known < MAX_WISHES and number not in self._ungranted and number not in self._begun
        if kind != Kind.WISH or not is_new or not 0 < count <= MAX_PAGES or group >= len(self._receive_buffers.pools):
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
            self._say(Kind.REFUSED, batch.number)
            return
        self._ungranted[batch.number] = batch
        self.granted()

    def _on_written_word(self, number: int) -> None:
        self.read()
        if number not in self._begun:
            raise LinkLost("the peer wrote what it had no leave for")
        if self._on_written(self._begun[number]):
            del self._begun[number]
            self._say(Kind.LANDED, number)

    def _say(self, kind: Kind, number: int, place: int = 0, count: int = 0) -> None:
        if self._link.stream.queued >= MAX_WISHES:
            raise LinkLost("the peer does not read its answers")
        self._link.stream.send([NOTE.pack(kind, number, place, count)])


@dataclass(slots=True)
class WriteRequest:
    """A write that is under way; ``at`` of its pages have been written. ``writing``: who moves them, of some more."""

    handle: WriteHandle
    pages: PageWrite
    at: int = 0
    count: int = 0
    writing: Any = None


class Mover(Protocol):
    """What moves the bytes."""

    def has_landed(self, write: Any) -> bool:
        """Whether every byte is there. Raises ``LinkLost``."""
        ...


class WriteRequestWriter(ABC):
    """The writer's end of one link. ``leave``: the kind of leave that its owner gives."""

    leave: ClassVar[Kind]

    def __init__(self, link: Link, mover: Mover, groups: Sequence[PageGroup]) -> None:
        self._link = link
        self._mover = mover
        self._groups = groups
        self._note = bytearray(NOTE.size)
        self._write_requests: dict[int, WriteRequest] = {}
        self._next = 0

    @abstractmethod
    def _start(self, request: WriteRequest, place: int, count: int) -> Any:
        """Begin to write the request's next ``count`` pages; return the argument of ``has_landed``. ``LinkLost``."""

    @property
    def under_way(self) -> bool:
        """Whether anything is."""
        return bool(self._write_requests)

    def read(self) -> None:
        """Wait for what the owner says next."""
        self._link.stream.read([memoryview(self._note)], self._on_note)

    def write(self, pages: PageWrite) -> WriteHandle:
        """As ``OutgoingLink.write``."""
        group = self._groups[pages.group]
        total = len(pages.dst) * group.piece_bytes(pages.layers)
        if len(pages.dst) > MAX_PAGES or total > MAX_BATCH_BYTES:
            raise BadPages(f"a batch of {len(pages.dst)} pages and {total} bytes is too large")
        if not self._write_requests:
            self._link.stream.last_progress = time.monotonic()  # silence before this was nobody's fault
        handle = WriteHandle()
        self._write_requests[self._next] = WriteRequest(handle, pages)
        room, attempt = pages.handover.room, pages.handover.attempt
        word = WORD.pack(Kind.WISH, self._next, room, attempt, pages.group, *pages.layers, len(pages.dst))
        self._link.stream.send([word + pages.dst.astype(PAGE_NUMBER).tobytes()])
        self._next += 1
        return handle

    def look(self) -> None:
        """Say what has been written. Raises ``LinkLost``."""
        for number, request in self._write_requests.items():
            if request.writing is not None and self._mover.has_landed(request.writing):
                request.writing = None
                request.at += request.count
                self._link.stream.send([WORD.pack(Kind.WRITTEN, number, 0, 0, 0, 0, 0, 0)])

    def close(self, reason: str) -> None:
        """The link is over."""
        for request in self._write_requests.values():
            request.handle.state, request.handle.error = WriteState.FAILED, reason
        self._write_requests.clear()

    def _on_note(self) -> None:
        kind, number, place, count = NOTE.unpack(self._note)
        self.read()
        request = self._write_requests.get(number)
        if request is None or request.writing is not None:
            raise LinkLost("the peer speaks of a batch that was not sent")
        if kind == self.leave:
            if not 0 < count <= len(request.pages.src) - request.at:
                raise LinkLost("the peer gives leave for pages that nobody asked for")
            request.count = count
            request.writing = self._start(request, place, count)
            return
        is_whole = request.at == len(request.pages.dst)
        if not (kind == Kind.REFUSED or (kind == Kind.LANDED and is_whole)):
            raise LinkLost("the peer says what has no meaning here")
        del self._write_requests[number]
        request.handle.state = WriteState.DONE if kind == Kind.LANDED else WriteState.FAILED
        request.handle.error = "" if kind == Kind.LANDED else "the peer has no such pages"
