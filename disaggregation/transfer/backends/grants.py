"""Who may write which pages of this instance's pool."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ....messages.base import I32
from .base import Spans

NOBODY = 0


class Grants:
    """One writer a page at most. Page 0 is never anybody's."""

    def __init__(self, num_pages: int, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._writers: npt.NDArray[np.int32] = np.zeros(num_pages, dtype=np.int32)
        self._numbers: dict[str, int] = {}

    def grant(self, peer: str, pages: I32) -> None:
        """``pages`` are ``peer``'s to write."""
        self._writers[pages] = self._numbers.setdefault(peer, len(self._numbers) + 1)

    def revoke(self, pages: I32) -> None:
        """``pages`` are nobody's."""
        self._writers[pages] = NOBODY

    def covers(self, peer: str, spans: Spans) -> bool:
        """Whether ``peer`` may write all of ``spans``, which lie within the pool."""
        number = self._numbers.get(peer, NOBODY)
        if number == NOBODY:
            return False
        return bool((self._writers[self.pages(spans)] == number).all())

    def pages(self, spans: Spans) -> npt.NDArray[np.int64]:
        """The pages that ``spans`` touch."""
        first = spans[:, 0] // self._page_bytes
        counts = (spans[:, 0] + spans[:, 1] - 1) // self._page_bytes - first + 1
        # The k-th page of all: its span's first, and how far it is into the span.
        starts = np.cumsum(counts) - counts
        return np.repeat(first - starts, counts) + np.arange(int(counts.sum()))
