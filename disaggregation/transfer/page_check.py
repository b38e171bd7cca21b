"""Whether landed pages are what the sender had, and their conversion into our own order once that is certain."""

from __future__ import annotations

import numpy as np
import xxhash

from ...messages.base import I32, HandoverId
from .page_order import PageConverter
from .pages import neighbour_spans


class PageCheck:
    """Hashes ``pages`` of a pool, then converts them: piece by piece, so that it does not hold up anything else.

    The checksum is that of the bytes as they were sent, so every page is hashed before the first one is converted.
    """

    def __init__(self, handover: HandoverId, pages: I32, checksum: int, converter: PageConverter | None = None) -> None:
        self.handover = handover
        self._to_hash = pages
        self._to_convert = pages if converter is not None else pages[:0]
        self._converter = converter
        self._checksum = checksum
        self._hasher = xxhash.xxh3_64()
        self._right: bool | None = None

    def step(self, pool: memoryview, page_bytes: int, budget: int) -> bool | None:
        """Work on about ``budget`` bytes; returns whether the checksum is right once all is done, None before."""
        count = max(1, budget // page_bytes)
        if self._right is None:
            self._hash(pool, page_bytes, count)
        else:
            self._convert(pool, page_bytes, count)
        done = self._right is False or not len(self._to_convert)
        return self._right if done else None

    def _hash(self, pool: memoryview, page_bytes: int, count: int) -> None:
        batch, self._to_hash = self._to_hash[:count], self._to_hash[count:]
        for offset, length in neighbour_spans(batch, batch, page_bytes)[0].tolist():
            self._hasher.update(pool[offset : offset + length])
        if not len(self._to_hash):
            self._right = bool(self._hasher.intdigest() == self._checksum)

    def _convert(self, pool: memoryview, page_bytes: int, count: int) -> None:
        batch, self._to_convert = self._to_convert[:count], self._to_convert[count:]
        assert self._converter is not None
        for page in batch.tolist():
            self._converter.convert(np.frombuffer(pool[page * page_bytes : (page + 1) * page_bytes], dtype=np.uint8))
