"""One hand-over's pages on their way to a peer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import xxhash

from ...messages.base import I32, HandoverId
from ...messages.worker import SendEnded
from .backends.base import TransferBackend, WriteHandle, WriteState
from .pages import PageGroup, PageWrite, neighbour_spans

MAX_SLICE_PAGES = 1024


class _Landing(NamedTuple):
    """A slice under way."""

    handle: WriteHandle
    nbytes: int


class OutgoingPages:
    """Chunks wait in ``_chunks``, are pushed in slices, and count once they have landed.

    It is over when it failed, was cancelled, or has its last pages and pushed all; it may end when nothing is under way
    any more. ``whole`` says that the last pages were handed in, ``lost`` that the end of a slice can't be known: then
    it may end with its link.
    """

    def __init__(self, handover: HandoverId, group: PageGroup, clock: Callable[[], float]) -> None:
        self.handover = handover
        self.whole = False
        self.error: str | None = None
        self.cancelled = False
        self.lost = False
        self._group = group
        self._slices = 0
        self._clock = clock
        self._chunks: deque[tuple[I32, I32]] = deque()
        self._landing: deque[_Landing] = deque()
        self._hasher = xxhash.xxh3_64()
        self._nbytes = 0
        self._seconds = 0.0
        self._busy_since: float | None = None
        self._began = 0.0
        self._ended = 0.0

    @property
    def pending(self) -> bool:
        """Whether a slice can be pushed."""
        return bool(self._chunks)

    @property
    def landing(self) -> bool:
        """Whether slices are under way."""
        return bool(self._landing)

    @property
    def over(self) -> bool:
        """Whether nothing can happen to its pages any more."""
        ended = self.error is not None or self.cancelled or (self.whole and not self._chunks)
        return ended and not self._landing

    def add(self, src: I32, dst: I32) -> None:
        """Push ``src`` to ``dst`` after what was added before."""
        if len(src):
            self._chunks.append((src, dst))
            self._busy_since = self._busy_since or self._clock()
            self._began = self._began or self._busy_since

    def push_slice(self, backend: TransferBackend, pool: memoryview, slice_bytes: int) -> int:
        """Start to write up to ``slice_bytes`` (one page at least); returns how many. Raises as ``backend.write``."""
        src, dst = self._chunks[0]
        page_bytes = self._group.page_bytes
        count = min(max(1, slice_bytes // page_bytes), MAX_SLICE_PAGES, len(src))
        write = PageWrite(self.handover, self._slices, src[:count], dst[:count], self._group.whole())
        nbytes = count * page_bytes
        self._landing.append(_Landing(backend.write(write), nbytes))
        self._slices += 1
        if count < len(src):
            self._chunks[0] = src[count:], dst[count:]
        else:
            self._chunks.popleft()
        if backend.can.moves_data:
            for offset, length in neighbour_spans(write.src, write.src, page_bytes)[0].tolist():
                self._hasher.update(pool[offset : offset + length])
        return nbytes

    def reap(self, backend: TransferBackend) -> tuple[int, int]:
        """Take note of slices that have landed or failed; returns their number and bytes."""
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
            count, nbytes = count + 1, nbytes + landing.nbytes
            if state is WriteState.DONE:
                self._nbytes += landing.nbytes
            else:
                self.fail(landing.handle.error)
        if not self._landing and not self._chunks:
            self._rest()
        return count, nbytes

    def fail(self, error: str) -> None:
        """Push nothing more; the first reason counts."""
        self.error = self.error or error
        self._chunks.clear()

    def cancel(self) -> None:
        """Push nothing more."""
        self.cancelled = True
        self._chunks.clear()

    def ended(self, *, checksummed: bool) -> SendEnded:
        """What to tell the scheduler."""
        self._rest()
        return SendEnded(
            self.handover,
            self._hasher.intdigest() if checksummed else 0,
            self._nbytes,
            self._seconds,
            self.cancelled,
            self.error,
            self._began,
            self._ended,
        )

    def _rest(self) -> None:
        """Nothing is under way, and nothing waits."""
        if self._busy_since is not None:
            self._ended = self._clock()
            self._seconds += self._ended - self._busy_since
            self._busy_since = None
