"""The pages of one hand-over that are sent to a peer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from msgspec.structs import replace

from ...mem_cache.kv_pages.page_group import LayerRange, PageGroup
from ...mem_cache.kv_pages.staging import Part
from ...messages.base import I32, HandoverId
from ...messages.handover import MAX_SLICES
from ...messages.worker import SendEnded, SliceChecksum
from ...runtime.layers_done import LayersDone
from ..errors import TransferError
from .backends.base import TransferBackend, WriteHandle, WriteState
from .page_pool import PagePool
from .page_write import PageWrite

MAX_SLICE_PAGES = 1024
"""Maximum number of pages in a slice."""
MIN_AHEAD_BYTES = 4 << 20
"""Minimum size in bytes of computed layers that are pushed before the rest of a chunk is computed.

Less is not worth writing a page in parts, because its neighbours can't be written together with it then.
"""
PROGRESS_SECONDS = 5.0
"""Minimum seconds between two progress reports of one hand-over."""


@dataclass(slots=True)
class _Chunk:
    """Pages of ``group`` that one step completes."""

    group: PageGroup
    first: int
    """Index of the first page within the hand-over's pages of this group."""
    src: I32
    dst: I32
    done: LayersDone | None
    """Counter of the step's computed layers, None if all are computed."""
    ahead: int
    """Minimum number of layers to push before all are computed."""
    begin: int = 0
    """First layer that is being pushed; those before it are pushed."""
    at: int = 0
    """Number of pages of which the layers from ``begin`` to ``end`` are pushed."""
    end: int = 0
    """End of the layers that are being pushed."""

    def next_layers(self) -> LayerRange | None:
        """Return the layers that may be pushed now, or None if fewer than ``ahead`` more are computed, and not all.

        Once pages of some layers were pushed, these layers are returned until all pages of the chunk have them.
        """
        if not self.at:
            num_layers = self.group.num_layers
            count = num_layers if self.done is None else self.group.layers_done(self.done.count)
            # Push all computed layers, so that a page is written in as few parts as possible.
            self.end = count if count == num_layers or count >= self.begin + self.ahead else self.begin
        return LayerRange(self.begin, self.end) if self.end > self.begin else None

    def advance(self, pages: int) -> None:
        """Record that a write of the current layers of ``pages`` more pages was started."""
        self.at += pages
        if self.at == len(self.src):
            self.begin, self.at = self.end, 0


class _Landing(NamedTuple):
    """A slice under way. ``slots``: the slots of ``pool`` that it occupies until it lands."""

    handle: WriteHandle
    nbytes: int
    pool: PagePool
    slots: I32 | None


class _Queue:
    """Waiting chunks of a group. ``pages``: number of pages added so far."""

    def __init__(self, number: int, pool: PagePool) -> None:
        self.number = number
        self.pool = pool
        self.pages = 0
        self.chunks: deque[_Chunk] = deque()
        self.parts: dict[int, Part] = {}
        """Slices to be added up by the device at the end, by number."""

    def next_layers(self) -> LayerRange | None:
        """Return the layers of the first chunk that may be pushed now; None if there are none or no slot is free."""
        has_room = self.pool.slots is None or self.pool.slots.free > 0
        return self.chunks[0].next_layers() if has_room and self.chunks else None


class OutgoingPages:
    """The chunks of one hand-over: they wait in a queue for each group and are pushed in slices.

    The transfer is ``over`` when no slice is under way, and it has failed, was cancelled, or has pushed its last pages.
    """

    def __init__(
        self, handover: HandoverId, pools: Sequence[PagePool | None], clock: Callable[[], float], *, summed: bool
    ) -> None:
        """Create an empty transfer.

        ``pools``: the pool of each group of the layout, None for a group without bytes. ``summed``: whether slices have
        checksums.
        """
        self.handover = handover
        self.whole = False
        """Whether the last pages were added."""
        self.error: str | None = None
        self.cancelled = False
        self.lost = False
        """Whether the state of a slice can't be known. It is over when its link ends."""
        self.reported_at = clock()
        """Time of the last progress report."""
        self._queues = [_Queue(i, pool) for i, pool in enumerate(pools) if pool is not None]
        self._summed = summed
        self._writes = 0
        self._clock = clock
        self._landing: deque[_Landing] = deque()
        self._slices: list[SliceChecksum] = []
        self._nbytes = 0
        self._seconds = 0.0
        self._busy_since: float | None = None
        self._began = 0.0
        self._ended = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes that have landed."""
        return self._nbytes

    @property
    def pending(self) -> bool:
        """Whether pages have still to be pushed, now or after they are computed. Slices under way do not count."""
        return any(queue.chunks for queue in self._queues)

    @property
    def ready(self) -> bool:
        """Whether a slice can be pushed now."""
        return self._next() is not None

    @property
    def landing(self) -> bool:
        """Whether slices are under way."""
        return bool(self._landing)

    @property
    def over(self) -> bool:
        """Whether the transfer has ended, so that its pages are not read or written any more."""
        ended = self.error is not None or self.cancelled or (self.whole and not self.pending)
        return ended and not self._landing

    def add(self, group: int, src: I32, dst: I32, done: LayersDone | None = None) -> None:
        """Queue the pages ``src`` of a group with bytes, to be written to ``dst`` as ``done`` counts their layers as
        computed.

        With ``done`` None all are computed. Pages of a group are pushed in the order in which they were added.
        """
        if len(src):
            queue = next(queue for queue in self._queues if queue.number == group)
            kind = queue.pool.group
            nbytes, layers = len(src) * kind.page_bytes, kind.num_layers
            ahead = min(layers, max(1, -(-MIN_AHEAD_BYTES * layers // nbytes)))
            queue.chunks.append(_Chunk(kind, queue.pages, src, dst, done, ahead))
            queue.pages += len(src)

    def push_slice(self, backend: TransferBackend, slice_bytes: int) -> int:
        """Start to write up to ``slice_bytes`` bytes, at least one page, and return the number of bytes.

        Return 0 if nothing is ``ready``. Raises what ``backend.write`` raises.
        """
        if (next_piece := self._next()) is None:
            return 0
        queue, layers = next_piece
        pool, chunk = queue.pool, queue.chunks[0]
        if self._busy_since is None:
            self._busy_since = self._clock()
            self._began = self._began or self._busy_since
        piece_bytes = pool.group.piece_bytes(layers)
        at, first = chunk.at, chunk.first + chunk.at
        count = min(max(1, slice_bytes // piece_bytes), MAX_SLICE_PAGES, len(chunk.src) - at)
        src, slots = chunk.src[at : at + count], None
        if pool.slots is not None:
            src = slots = pool.slots.fetch(src, layers)
            count = len(slots)
        nbytes = count * piece_bytes
        write = PageWrite(self.handover, self._writes, src, chunk.dst[at : at + count], layers, pool.number)
        try:
            handle = backend.write(write)
        except TransferError:
            _give_back(pool, slots)
            raise
        self._landing.append(_Landing(handle, nbytes, pool, slots))
        self._writes += 1
        chunk.advance(count)
        if chunk.begin == pool.group.num_layers:
            queue.chunks.popleft()
        if backend.can.moves_data:
            by_words = pool.has_sums and backend.lands_on_device(self.handover.epoch)
            self._note_slice(queue, first, src, layers, "words" if by_words else "xxh3")
        return nbytes

    def _note_slice(
        self, queue: _Queue, first: int, src: I32, layers: LayerRange, algorithm: Literal["xxh3", "words"]
    ) -> None:
        if len(self._slices) == MAX_SLICES:
            self.fail(f"the prompt needs more than {MAX_SLICES} writes; use a larger --page-size")
            return
        checksum = 0
        if self._summed and algorithm == "words":
            # The device adds up all slices at the end, so that the host waits once.
            queue.parts[len(self._slices)] = Part(src, *layers)
        elif self._summed:
            checksum = queue.pool.checksum(src, layers)
        self._slices.append(SliceChecksum(first, len(src), *layers, checksum, queue.number, algorithm))

    def reap(self, backend: TransferBackend) -> tuple[int, int]:
        """Remove slices that have landed or failed, oldest first, and return their number and bytes.

        A failed slice fails the transfer.
        """
        count = nbytes = 0
        while self._landing:
            landing = self._landing[0]
            state = backend.poll(landing.handle)
            if state is WriteState.PENDING:
                break
            if state is WriteState.LOST:
                self.lost = True
                self.fail(landing.handle.error)
                break
            self._landing.popleft()
            _give_back(landing.pool, landing.slots)
            count, nbytes = count + 1, nbytes + landing.nbytes
            if state is WriteState.DONE:
                self._nbytes += landing.nbytes
            else:
                self.fail(landing.handle.error)
        if not self._landing and not self.ready:
            self._rest()  # waiting for computation does not count as pushing
        return count, nbytes

    def fail(self, error: str) -> None:
        """Start no more slices because of ``error``. The first error is kept."""
        self.error = self.error or error
        self._drop()

    def cancel(self) -> None:
        """Start no more slices, on request. Slices under way still land."""
        self.cancelled = True
        self._drop()

    def ended(self) -> SendEnded:
        """Return the final report for the scheduler, with the checksums that a device adds up now.

        The pages must not have changed since they were pushed.
        """
        self._rest()
        for queue in self._queues:
            sums = queue.pool.word_sums(list(queue.parts.values())) if queue.parts else []
            for number, checksum in zip(queue.parts, sums, strict=True):
                self._slices[number] = replace(self._slices[number], checksum=checksum)
        return SendEnded(
            self.handover,
            self._slices,
            self._nbytes,
            self._seconds,
            self.cancelled,
            self.error,
            self._began,
            self._ended,
        )

    def _drop(self) -> None:
        for queue in self._queues:
            queue.chunks.clear()

    def _next(self) -> tuple[_Queue, LayerRange] | None:
        """Return the first queue with pages that can be pushed now, and their layers, or None."""
        for queue in self._queues:
            if (layers := queue.next_layers()) is not None:
                return queue, layers
        return None

    def _rest(self) -> None:
        """Stop the clock that measures how long slices were under way."""
        if self._busy_since is not None:
            self._ended = self._clock()
            self._seconds += self._ended - self._busy_since
            self._busy_since = None


def _give_back(pool: PagePool, slots: I32 | None) -> None:
    if pool.slots is not None and slots is not None:
        pool.slots.give(slots)
