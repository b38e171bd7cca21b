"""How a library that writes one-sidedly fills slabs of the owner's host memory, where the owner's pool is on a device.

Neither the library nor the owner can tell where in a slab what ends, so both say it on the lease, beside the library:

    writer: the pages that it wants to write ─▶ owner: a slab for some of them ─▶ (the library fills it) ─▶
    writer: filled ─▶ owner: hashed, brought into our order, copied to the device ─▶ the next slab | landed

Several batches may be under way, each with a slab at a time. A batch that waits for one holds none, so that however
little memory there is, everything moves on.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import numpy as np

from ...errors import BadPages, LinkLost
from ..pages import LayerRange, PageGroup, PageWrite, Spans, check_pages
from ..staging import Slabs
from .base import WriteHandle, WriteState
from .grants import Writer
from .landings import MAX_BATCH_BYTES, MAX_PAGES, PAGE_NUMBER, Batch, Landings, Passage
from .link import Link

WORD = struct.Struct("<BQQQHHHI")
"""The writer's: kind, batch; and of a wish hand-over, group, layers, number of pages, which follow."""
NOTE = struct.Struct("<BQQI")
"""The owner's: kind, batch; and of a slab its place, and for how many pages it is."""
MAX_WISHES = 1024
"""Batches that may be under way by a link; an honest writer's engine asks for far fewer."""


class Kind(IntEnum):
    """What is said."""

    WISH = 1
    FILLED = 2
    SLAB = 3
    LANDED = 4
    REFUSED = 5


class Filler(Protocol):
    """The library's end that fills slabs; see ``leased_backend.Courier``."""

    def fill(self, group: int, spans: Spans, there: int) -> Any:
        """Begin to write pieces of a pool of ours, one behind the other, to an address of the peer's."""
        ...

    def has_landed(self, write: Any) -> bool:
        """Whether every byte is there."""
        ...


class SlabReader:
    """The owner's end of one link."""

    def __init__(self, link: Link, landings: Landings, slabs: Slabs, stall_seconds: float) -> None:
        self._link = link
        self._landings = landings
        self._slabs = slabs
        self._stall_seconds = stall_seconds
        self._word = bytearray(WORD.size)
        self._ungranted: dict[int, Batch] = {}
        self._passing: dict[int, Passage] = {}

    def read(self) -> None:
        """Wait for what the writer says next."""
        self._link.stream.read([memoryview(self._word)], self._on_word)

    def is_writing(self, writer: Writer) -> bool:
        """Whether pages of a hand-over may be under way."""
        return any(passage.batch.writer == writer for passage in self._passing.values())

    def stalled_at(self) -> float | None:
        """As ``Link.stalled_at``."""
        owes = self._ungranted or any(passage.slab is not None for passage in self._passing.values())
        return self._link.stream.last_progress + self._stall_seconds if owes else None

    def granted(self) -> None:
        """Go on with what may be written by now."""
        for number, batch in list(self._ungranted.items()):
            if batch.is_granted:
                del self._ungranted[number]
                self._passing[number] = passage = self._landings.passage(batch)
                self.next_slab(passage)

    def next_slab(self, passage: Passage, *, in_turn: bool = False) -> None:
        """Tell the writer of a slab for its next pages, or wait for one."""
        if self._landings.take_slab(self._link, passage, in_turn=in_turn):
            assert passage.slab is not None
            self._say(Kind.SLAB, passage.batch.number, self._slabs.offset_of(passage.slab), len(passage.part))
            self._link.stream.last_progress = time.monotonic()  # silence before this was nobody's fault

    def look(self) -> None:
        """Raises ``LinkLost`` for who wants to write what nobody asked it for."""
        late = self._link.stream.last_progress + self._stall_seconds < time.monotonic()
        if self._ungranted and late:
            raise LinkLost("the peer wants to write pages that it was not asked for")

    def close(self) -> None:
        """Nothing is written any more: give back all that is held."""
        self._landings.leave(self._link)
        for passage in self._passing.values():
            passage.drop()
        self._passing.clear()
        self._ungranted.clear()

    def _on_word(self) -> None:
        kind, number, room, attempt, group, begin, end, count = WORD.unpack(self._word)
        if kind == Kind.FILLED:
            self._on_filled(number)
            return
        known = len(self._ungranted) + len(self._passing)
        is_new = known < MAX_WISHES and number not in self._ungranted and number not in self._passing
        if kind != Kind.WISH or not is_new or not 0 < count <= MAX_PAGES or group >= len(self._landings.pools):
            raise LinkLost("the peer sent a malformed batch")
        pool, layers = self._landings.pools[group], LayerRange(begin, end)
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

    def _on_filled(self, number: int) -> None:
        self.read()
        passage = self._passing.get(number)
        if passage is None or passage.slab is None:
            raise LinkLost("the peer filled what it was not given")
        if passage.land():
            del self._passing[number]
            self._say(Kind.LANDED, number)
        else:
            self.next_slab(passage)

    def _say(self, kind: Kind, number: int, place: int = 0, count: int = 0) -> None:
        if self._link.stream.queued >= MAX_WISHES:
            raise LinkLost("the peer does not read its answers")
        self._link.stream.send([NOTE.pack(kind, number, place, count)])


@dataclass(slots=True)
class _Wish:
    """A write that is under way; ``at`` of its pages have been written. ``filling``: the library's, of some more."""

    handle: WriteHandle
    pages: PageWrite
    at: int = 0
    count: int = 0
    filling: Any = None


class SlabWriter:
    """The writer's end of one link."""

    def __init__(self, link: Link, courier: Filler, groups: Sequence[PageGroup], address: int, nbytes: int) -> None:
        """``address``, ``nbytes``: of all slabs, in the owner's process."""
        self._link = link
        self._courier = courier
        self._groups = groups
        self._address = address
        self._nbytes = nbytes
        self._note = bytearray(NOTE.size)
        self._wishes: dict[int, _Wish] = {}
        self._next = 0

    @property
    def under_way(self) -> bool:
        """Whether anything is."""
        return bool(self._wishes)

    def read(self) -> None:
        """Wait for what the owner says next."""
        self._link.stream.read([memoryview(self._note)], self._on_note)

    def write(self, pages: PageWrite) -> WriteHandle:
        """As ``OutgoingLink.write``."""
        group = self._groups[pages.group]
        total = len(pages.dst) * group.piece_bytes(pages.layers)
        if len(pages.dst) > MAX_PAGES or total > MAX_BATCH_BYTES:
            raise BadPages(f"a batch of {len(pages.dst)} pages and {total} bytes is too large")
        handle = WriteHandle()
        self._wishes[self._next] = _Wish(handle, pages)
        room, attempt = pages.handover.room, pages.handover.attempt
        word = WORD.pack(Kind.WISH, self._next, room, attempt, pages.group, *pages.layers, len(pages.dst))
        self._link.stream.send([word + pages.dst.astype(PAGE_NUMBER).tobytes()])
        self._next += 1
        return handle

    def look(self) -> None:
        """Say which slabs are full. Raises ``LinkLost``."""
        for number, wish in self._wishes.items():
            if wish.filling is not None and self._courier.has_landed(wish.filling):
                wish.filling = None
                wish.at += wish.count
                self._link.stream.send([WORD.pack(Kind.FILLED, number, 0, 0, 0, 0, 0, 0)])

    def close(self, reason: str) -> None:
        """The link is over."""
        for wish in self._wishes.values():
            wish.handle.state, wish.handle.error = WriteState.FAILED, reason
        self._wishes.clear()

    def _on_note(self) -> None:
        kind, number, place, count = NOTE.unpack(self._note)
        self.read()
        wish = self._wishes.get(number)
        if wish is None or wish.filling is not None:
            raise LinkLost("the peer speaks of a batch that was not sent")
        if kind == Kind.SLAB:
            self._fill(wish, place, count)
            return
        is_whole = wish.at == len(wish.pages.dst)
        if not (kind == Kind.REFUSED or (kind == Kind.LANDED and is_whole)):
            raise LinkLost("the peer says what has no meaning here")
        del self._wishes[number]
        wish.handle.state = WriteState.DONE if kind == Kind.LANDED else WriteState.FAILED
        wish.handle.error = "" if kind == Kind.LANDED else "the peer has no such pages"

    def _fill(self, wish: _Wish, place: int, count: int) -> None:
        group, pages = self._groups[wish.pages.group], wish.pages
        end = place + count * group.piece_bytes(pages.layers)
        if not 0 < count <= len(pages.src) - wish.at or end > self._nbytes:
            raise LinkLost("the peer offers a slab that it does not have")
        wish.count = count
        spans = group.spans(pages.src[wish.at : wish.at + count], pages.layers)
        wish.filling = self._courier.fill(pages.group, spans, self._address + place)
