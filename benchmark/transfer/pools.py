"""The memory that every way of moving bytes moves: two pools, which all processes map."""

from __future__ import annotations

from types import TracebackType

import numpy as np

from ...mem_cache.kv_pages.region import allocate_region
from .cases import SEED, PageLists


class SharedPools:
    """``num_pages`` each, page 0 included. Use it as a context. Raises ``RegionError``."""

    def __init__(self, page_bytes: int, num_pages: int) -> None:
        self.page_bytes, self.num_pages = page_bytes, num_pages
        self._regions = [allocate_region(page_bytes * num_pages, shared=True) for _ in range(2)]
        self._source, self._destination = (
            np.frombuffer(region.buffer, np.uint8).reshape(num_pages, page_bytes) for region in self._regions
        )
        rng = np.random.default_rng(SEED)
        for page in self._source:
            page[:] = np.frombuffer(rng.bytes(page_bytes), np.uint8)

    @property
    def descriptors(self) -> list[int]:
        """Return the file descriptors of the source and the destination, in this order."""
        return [region.fd for region in self._regions if region.fd is not None]

    def clear(self) -> None:
        """Overwrite the destination with zeros, so that it differs from the source. That also commits its memory."""
        self._destination[:] = 0

    def has_landed(self, pages: PageLists) -> bool:
        """Return whether each destination page in ``pages`` has the bytes of its source page."""
        here, there = self._source, self._destination
        return all(
            np.array_equal(here[src], there[dst])
            for src, dst in zip(pages.src.tolist(), pages.dst.tolist(), strict=True)
        )

    def __enter__(self) -> SharedPools:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        del self._source, self._destination
        for region in self._regions:
            region.close()
