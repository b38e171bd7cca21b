"""Moves the end of pools that become smaller, or larger again, up to their maximum size."""

from __future__ import annotations

from collections.abc import Collection

from .base_prefix_cache import BasePrefixCache, KVHold


class PoolEnd:
    """The end of the pools, and its moves. ``holds``: all live holds, kept up to date by their owner.

    Sizes are in tokens of the full pool, in whole pages. The window pool follows it.
    """

    def __init__(self, cache: BasePrefixCache, holds: Collection[KVHold]) -> None:
        self._cache = cache
        self._allocator = cache.allocator
        self._windows = cache.allocator.windows
        self._holds = holds
        self._announced: int | None = None
        """Size that the pool gets once the requests that need more have ended; None if no change is planned."""
        self._before: int | None = None
        """Size before the change that is under way; None without one."""

    def announce(self, tokens: int) -> None:
        """Plan a change of the pool's size to ``tokens``, so that new requests fit into it. ``move`` makes the change.

        ``settle`` ends it, made or not.
        """
        self._announced, self._before = tokens, self._allocator.size

    def settle(self) -> None:
        """Forget the size that ``announce`` planned: the change was made, or will not be."""
        self._announced = self._before = None

    @property
    def undone(self) -> int:
        """Size in tokens that the pool keeps if the change fails; its present size if none is under way."""
        size = self._allocator.size
        return size if self._before is None else max(self._before, size)

    @property
    def most(self) -> int:
        """Maximum size of the pool in tokens, for which addresses are reserved."""
        return self._allocator.most_pages * self._allocator.page_size

    @property
    def window_pages(self) -> int:
        """Number of window pages, 0 without windows."""
        return self._windows.num_pages

    @property
    def beyond(self) -> int:
        """Pages in use that lie beyond the ends of the pools."""
        return self._allocator.beyond + self._windows.beyond

    @property
    def window_pages_leaving(self) -> int:
        """Number of window pages that must no longer be promised to requests, because the pool will lose them."""
        if self._announced is None:
            return 0
        return max(0, self._windows.num_pages - self._windows.pages_for(self._announced // self._allocator.page_size))

    def can_move(self, tokens: int) -> bool:
        """Return whether a pool of ``tokens`` tokens has as many window pages as are promised to requests; True without
        windows.
        """
        return self._windows.committed <= self._windows.pages_for(tokens // self._allocator.page_size)

    def is_held_behind(self, tokens: int) -> bool:
        """Return whether a request has pages beyond the first ``tokens`` tokens, or window pages beyond the end they
        imply.
        """
        size, windows, table = self._allocator.page_size, self._windows, self._cache.req_to_token.table
        pages = tokens // size
        rows = [table[hold.row, : hold.kv_len : size] // size for hold in self._holds]
        if any(row.max(initial=0) > pages for row in rows):
            return True
        spans = (row[hold.window.begin : hold.window.end] for row, hold in zip(rows, self._holds, strict=True))
        most = windows.pages_for(pages)
        return any(behind.max(initial=0) > most for span in spans for behind in windows.behind(span))

    def move(self, tokens: int) -> None:
        """Move the end of the pool: only the first ``tokens`` slots are handed out from now on, at most ``most``.

        Cached KV beyond the end is evicted, and so is any excess. Requests keep their pages there, which count as
        ``beyond`` until they are freed. If requests have more than the pool, they are retracted as they grow. The size
        must be one that ``can_move`` allows.
        """
        pages = tokens // self._allocator.page_size
        self._allocator.resize(pages)
        self._windows.resize(pages)
        if self._allocator.beyond:
            self._cache.withdraw()
        if (short := -self._allocator.available_size()) > 0:
            self._cache.evict(short)
        self._announced = None
