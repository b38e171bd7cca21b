"""Whether landed pages are what the sender had, and their conversion into our own order once that is certain."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

import numpy as np
import xxhash

from ...messages.base import I32, HandoverId
from ...messages.worker import SliceChecksum
from .page_order import PageConverter
from .pages import LayerRange, PageGroup

BATCH_BYTES = 1 << 20
"""Hashed at a time: a peer may say that all it has sent was one slice."""
SLICE_BYTES = 64 << 10
"""What is hashed in the time that a slice takes by itself: a peer may name very many."""


class PageCheck:
    """Hashes ``pages`` of a group, then converts them: piece by piece, so that it does not hold up anything else.

    The checksums are those of the bytes as they were sent, so every page is hashed before the first one is converted.
    Where they are not ``hashed``, it is enough that ``slices`` are all of the pages.
    """

    def __init__(
        self,
        handover: HandoverId,
        pages: I32,
        slices: Sequence[SliceChecksum],
        group: PageGroup,
        converter: PageConverter | None = None,
        *,
        hashed: bool = True,
    ) -> None:
        self.handover = handover
        self._pages = pages
        self._slices = slices
        self._group = group
        self._converter = converter
        self._hashed = hashed
        self._right = True
        self._work: Iterator[int] | None = None

    def step(self, pool: memoryview, budget: int) -> bool | None:
        """Work on about ``budget`` bytes; returns whether the pages are right once all is done, None before."""
        if self._work is None:
            self._work = self._check(pool)
        for nbytes in self._work:
            budget -= nbytes
            if budget <= 0:
                return None
        return self._right

    def _check(self, pool: memoryview) -> Iterator[int]:
        """Everything there is to do; yields the bytes of each part of it."""
        self._right = yield from covers(self._slices, len(self._pages), self._group.num_layers)
        for piece in self._slices if self._right and self._hashed else ():
            yield from self._hash(pool, piece)
            if not self._right:
                return
        if self._right and self._converter is not None:
            page_bytes = self._group.page_bytes
            for page in self._pages.tolist():
                self._converter.convert(
                    np.frombuffer(pool[page * page_bytes : (page + 1) * page_bytes], dtype=np.uint8)
                )
                yield page_bytes

    def _hash(self, pool: memoryview, piece: SliceChecksum) -> Iterator[int]:
        pages, layers = self._pages[piece.first : piece.first + piece.count], LayerRange(piece.begin, piece.end)
        piece_bytes = self._group.piece_bytes(layers)
        batch = max(1, BATCH_BYTES // piece_bytes)
        hasher = xxhash.xxh3_64()
        for at in range(0, len(pages), batch):
            part = pages[at : at + batch]
            for offset, length in self._group.spans(part, layers).tolist():
                hasher.update(pool[offset : offset + length])
            yield len(part) * piece_bytes
        self._right = bool(hasher.intdigest() == piece.checksum)


def covers(slices: Sequence[SliceChecksum], pages: int, layers: int) -> Generator[int, None, bool]:
    """Whether ``slices`` are every layer of every page, each once. Yields what that is worth, in bytes to hash."""
    there = np.zeros((pages, layers), dtype=np.bool_)
    for piece in slices:
        if piece.first + piece.count > pages or not piece.begin < piece.end <= layers:
            return False
        part = there[piece.first : piece.first + piece.count, piece.begin : piece.end]
        if part.any():
            return False
        part[:] = True
        yield SLICE_BYTES
    return bool(there.all())
