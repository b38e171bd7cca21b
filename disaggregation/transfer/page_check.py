"""Whether landed pages are what the sender had, and their conversion into our own order once that is certain."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ...mem_cache.kv_pages.page_group import LayerRange
from ...mem_cache.kv_pages.page_order import PageConverter
from ...mem_cache.kv_pages.staging import Part
from ...messages.base import I32, HandoverId
from ...messages.worker import SliceChecksum, VerifyPages
from .page_checksums import PageChecksums
from .page_pool import PagePool, new_hasher

BATCH_BYTES = 1 << 20
"""Hashed at a time: a peer may say that all it has sent was one slice."""
SUMS_AT_ONCE = 64
"""Maximum number of checksums that a device computes between two turns of other work."""
SLICE_BYTES = 64 << 10
"""What is hashed in the time that a slice takes by itself: a peer may name very many."""


class Landed(NamedTuple):
    """Pages of one ``group`` of a hand-over. ``converter`` is set if they are of another order than ours."""

    group: int
    pool: PagePool
    pages: I32
    converter: PageConverter | None = None


class PageCheck:
    """Hashes pages, then converts them: piece by piece, so that it does not hold up anything else.

    The checksums are those of the bytes as they were sent, so every page is hashed before the first one is converted.
    Where they are not ``hashed``, it is enough that ``slices`` are all of the pages.
    """

    def __init__(
        self,
        handover: HandoverId,
        landed: Sequence[Landed],
        slices: Sequence[SliceChecksum],
        *,
        hashed: bool = True,
    ) -> None:
        """Prepare the check of a hand-over's received pages; ``step`` makes it.

        ``landed``: the pages of each group that has bytes. ``slices``: the sender's checksums. ``hashed``: whether
        there are checksums to compare.
        """
        self.handover = handover
        self._landed = {part.group: part for part in landed}
        self._slices = slices
        self._hashed = hashed
        self._right = True
        self._summed: dict[int, list[tuple[Part, int]]] = {}
        """Parts of pages that devices add up, with the checksums that they must have, by group."""
        self._work: Iterator[int] | None = None

    def step(self, budget: int) -> bool | None:
        """Check about ``budget`` bytes. Return None while more is left, then whether all pages are right."""
        if self._work is None:
            self._work = self._check()
        for nbytes in self._work:
            budget -= nbytes
            if budget <= 0:
                return None
        return self._right

    def _check(self) -> Iterator[int]:
        """Do the whole check, and yield after each part the bytes that it cost."""
        sizes = {part.group: (len(part.pages), part.pool.group.num_layers) for part in self._landed.values()}
        self._right = yield from covers(self._slices, sizes)
        for piece in self._slices if self._right and self._hashed else ():
            yield from self._hash(piece)
            if not self._right:
                return
        yield from self._check_sums()
        for part in self._landed.values() if self._right else ():
            if part.converter is not None:
                yield from _convert(part, part.converter)

    def _check_sums(self) -> Iterator[int]:
        """Compare the checksums that devices compute, and yield their cost in bytes. The host waits once for many."""
        for group, summed in self._summed.items():
            for at in range(0, len(summed), SUMS_AT_ONCE):
                parts, expected = zip(*summed[at : at + SUMS_AT_ONCE], strict=True)
                self._right = self._right and self._landed[group].pool.word_sums(parts) == list(expected)
                yield SLICE_BYTES * len(parts)

    def _hash(self, piece: SliceChecksum) -> Iterator[int]:
        part = self._landed[piece.group]
        group = part.pool.group
        pages, layers = part.pages[piece.first : piece.first + piece.count], LayerRange(piece.begin, piece.end)
        if piece.algorithm == "words" and group.direct is None:
            # No honest writer sends these to the host, which is slow to compute them.
            self._right = False
            return
        if piece.algorithm == "words" and part.pool.has_sums:
            self._summed.setdefault(piece.group, []).append((Part(pages, *layers), piece.checksum))
            return
        piece_bytes = group.piece_bytes(layers)
        batch = max(1, BATCH_BYTES // piece_bytes)
        hasher = new_hasher(piece.algorithm)
        for at in range(0, len(pages), batch):
            some = pages[at : at + batch]
            for seen in part.pool.look(group.spans(some, layers)):
                hasher.update(seen)
            yield len(some) * piece_bytes
        self._right = bool(hasher.intdigest() == piece.checksum)


class PassedCheck(PageCheck):
    """Check of pages that are already on a device, by the checksums noted while they passed (``page_checksums.py``).

    All that was written has to be part of the slices: a page that was written twice may not hold what its slice had.
    """

    def __init__(
        self,
        handover: HandoverId,
        landed: Sequence[Landed],
        slices: Sequence[SliceChecksum],
        passed: PageChecksums,
        *,
        hashed: bool = True,
    ) -> None:
        super().__init__(handover, landed, slices, hashed=hashed)
        self._passed = passed

    def _check(self) -> Iterator[int]:
        yield from super()._check()
        pieces = sum(len(part.pages) * part.pool.group.num_layers for part in self._landed.values())
        self._right = self._right and self._passed.pieces == pieces

    def _hash(self, piece: SliceChecksum) -> Iterator[int]:
        part = self._landed[piece.group]
        pages, layers = part.pages[piece.first : piece.first + piece.count], LayerRange(piece.begin, piece.end)
        self._right = self._passed.checksum(part.pool.number, layers, pages) == piece.checksum
        yield SLICE_BYTES


def make_check(command: VerifyPages, landed: Sequence[Landed], passed: PageChecksums | None) -> PageCheck:
    """Make the check of received pages: of those in a pool, or of staged ones by the checksums ``passed``.

    ``passed``: those noted while the pages passed through host memory to a device. None: none were noted, so that the
    check of staged pages fails.
    """
    handover, slices, hashed = command.handover, command.slices, command.checksum
    if all(part.pool.group.staging is None for part in landed):
        return PageCheck(handover, landed, slices, hashed=hashed)
    return PassedCheck(handover, landed, slices, passed or PageChecksums(), hashed=hashed)


def _convert(part: Landed, converter: PageConverter) -> Iterator[int]:
    for page in part.pages.tolist():
        part.pool.change(page, converter.convert)
        yield part.pool.group.page_bytes


def covers(slices: Sequence[SliceChecksum], sizes: Mapping[int, tuple[int, int]]) -> Generator[int, None, bool]:
    """Return whether ``slices`` cover every layer of every page of each group exactly once.

    False also if a slice names pages or layers that do not exist. ``sizes``: pages and layers by group. Yields the
    cost of each slice, in bytes to hash.
    """
    there = {group: np.zeros(size, dtype=np.bool_) for group, size in sizes.items()}
    for piece in slices:
        pages, layers = sizes.get(piece.group, (0, 0))
        if piece.first + piece.count > pages or not piece.begin < piece.end <= layers:
            return False
        part = there[piece.group][piece.first : piece.first + piece.count, piece.begin : piece.end]
        if part.any():
            return False
        part[:] = True
        yield SLICE_BYTES
    return all(bool(group.all()) for group in there.values())
