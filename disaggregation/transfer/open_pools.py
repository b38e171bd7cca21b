"""The pools that are open to peers, one for each group of the layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...mem_cache.kv_pages.page_group import PageGroup
from ...messages.base import I32
from ...messages.worker import PagesByGroup
from ..errors import BadPages
from .page_pool import PagePool, pool_of
from .page_write import unpack_pages

MAX_PAGE = 1 << 31
"""Upper bound (exclusive) of page numbers in pools with an unknown size."""


class OpenPools:
    """The pools of a layout's groups, in its order; None for a group without bytes, where pages are only numbers."""

    def __init__(self, groups: Sequence[PageGroup | None]) -> None:
        self.moved = [group for group in groups if group is not None]
        """The groups with bytes, in the order in which the backend numbers them."""
        self.pools = [g if g is None else pool_of(g, self.moved.index(g)) for g in groups]
        self._num_pages = [MAX_PAGE if pool is None else pool.group.num_pages for pool in self.pools]
        self._unbounded = [MAX_PAGE] * len(self.pools)

    @property
    def has_staging(self) -> bool:
        """Whether pages pass through host memory on their way to or from a device."""
        return any(group.staging is not None for group in self.moved)

    @property
    def numbers(self) -> list[int]:
        """Numbers within the layout of the groups that have bytes."""
        return [number for number, pool in enumerate(self.pools) if pool is not None]

    def pairs(self, pages: Sequence[I32]) -> Iterator[tuple[int, PagePool, I32]]:
        """Yield number, pool and page numbers of each group with bytes; ``pages`` has an entry for every group of the
        layout.
        """
        for number, (pool, some) in enumerate(zip(self.pools, pages, strict=True)):
            if pool is not None:
                yield number, pool, some

    def unpack(self, pages: PagesByGroup, what: str, *, theirs: bool = False) -> list[I32]:
        """Decode the page numbers of each group. Raises ``BadPages`` if a group or page does not exist.

        ``theirs``: they are a peer's, of a pool with unknown size. ``what`` names the pages in the error.
        """
        if len(pages) != len(self.pools):
            raise BadPages(f"{what} pages of {len(pages)} groups where there are {len(self.pools)}")
        limits = self._unbounded if theirs else self._num_pages
        return [unpack_pages(packed, count, what) for packed, count in zip(pages, limits, strict=True)]

    def close(self) -> None:
        """Release the views of the pools' memory."""
        for pool in self.pools:
            if pool is not None:
                pool.memory.release()
