"""Whether landed pages are what the sender had."""

from __future__ import annotations

import xxhash

from ..messages.base import I32
from .page_spans import page_spans


class PageCheck:
    """Hashes ``pages`` of ``pool`` piece by piece, so that a long check does not hold up anything else."""

    def __init__(self, room: int, pages: I32, checksum: int) -> None:
        self.room = room
        self._pages = pages
        self._checksum = checksum
        self._hasher = xxhash.xxh3_64()

    def step(self, pool: memoryview, page_bytes: int, budget: int) -> bool | None:
        """Hash about ``budget`` bytes; returns whether the checksum is right once all is hashed, None before."""
        count = max(1, budget // page_bytes)
        batch, self._pages = self._pages[:count], self._pages[count:]
        for offset, length in page_spans(batch, batch, page_bytes)[0].tolist():
            self._hasher.update(pool[offset : offset + length])
        return None if len(self._pages) else bool(self._hasher.intdigest() == self._checksum)
