"""Memory of requests that hand-overs read and write.

A hand-over pins a request's memory as long as its peer may touch it (``pin``, ``unpin``). What it moves of a row is a
``PageRun``: its pages of each group.
"""

from __future__ import annotations

from ..mem_cache.base_prefix_cache import KVHold, require_live
from ..mem_cache.errors import WindowPagesShort
from ..mem_cache.page_run import PageRun
from ..messages.base import I32
from .kv_debug import Debug
from .kv_pool import KVPool
from .memory_terms import Fence
from .req import Req, hold_of
from .tiers import Tiers


class PinnedMemory:
    """The hand-overs' view of KV memory."""

    def __init__(self, pool: KVPool, tiers: Tiers, debug: Debug) -> None:
        self._pool = pool
        self._copies = tiers.copies
        self._debug = debug

    def pin(self, req: Req) -> KVHold:
        """Keep the request's memory from being freed until ``unpin``, even if the request ends before."""
        hold = hold_of(req)
        hold.pins += 1
        return hold

    def unpin(self, hold: KVHold) -> None:
        """Release one pin. Without pins the memory is freed; verified KV of its first tokens stays cached.

        A live request has a pin of its own, so a hand-over's pin is never its last.
        """
        require_live(hold)
        hold.pins -= 1
        if hold.pins:
            return
        if hold.left is None:
            raise AssertionError(f"the memory in row {hold.row} was released while its request lives")
        self._pool.release(hold, hold.left)

    def run(self, start: int, end: int, goes_on: int) -> PageRun:
        """Return the page numbers within a request that hold positions ``[start, end)``, for all layers and for
        windowed ones.

        ``start`` is page-aligned. ``goes_on``: position at which the receiver continues. Windowed layers need only the
        pages within their window before it.
        """
        size = self._pool.page_size
        first, last = start // size, -(-end // size)
        if not self._pool.has_windows:
            return PageRun(first, last)
        return PageRun(first, last, min(max(first, goes_on // size - self._pool.windows.reach), last))

    def pages_in(self, hold: KVHold, run: PageRun, begin: int, end: int) -> list[I32]:
        """Return the pool's pages for pages ``[begin, end)`` of a request, one array for each group of layers.

        The groups are those of the layout. Only pages that ``run`` names are returned: fewer for windowed layers.
        Raises ``WindowPagesShort`` if one of them has no window page.
        """
        size, row = self._pool.page_size, self._pool.table.table[hold.row]
        parts = run.within(begin, end)
        pages: list[I32] = [row[a * size : b * size : size] // size for a, b in parts]
        for window_pages in self._pool.windows.behind(pages[-1]):
            if not window_pages.all():
                raise WindowPagesShort(f"row {hold.row}: of pages {parts[1]} some have no window page")
            pages[1] = window_pages
        return pages

    def expect(self, req: Req, length: int, goes_on: int) -> None:
        """Take window pages for the first ``length`` tokens of the request, which a peer will write.

        ``goes_on``: position at which this instance continues; only its window is taken. The pages were reserved at
        admission. Steps up to ``let_go_step`` may still touch them.
        """
        self._pool.move_window(hold_of(req), goes_on, length)

    def keep_window(self, hold: KVHold, run: PageRun) -> bool:
        """Keep the window pages of ``run`` for a hand-over that reads them, until ``let_window_go``.

        The request's window may move on meanwhile. Return False, with nothing changed, if the pages cannot be kept.
        """
        if run.window is None:
            return True
        return self._pool.windows.keep(hold.window, self._pool.table.table[hold.row], run.window)

    def let_window_go(self, hold: KVHold) -> None:
        """Release window pages kept by ``keep_window``."""
        self._pool.windows.let_go(hold.window)

    def fence(self) -> Fence:
        """Return the latest step, copy and hash check that may still touch memory which can be allocated now.

        The result is not valid while a step is being planned.
        """
        return Fence(self._pool.let_go_step, self._copies.fence(), self._debug.newest)

    def is_past(self, fence: Fence, completed_step: int) -> bool:
        """Return whether the steps, copies and hash checks up to ``fence`` are done. ``completed_step``: the last step
        done.
        """
        is_past = completed_step >= fence.step and self._copies.done >= fence.copies
        return is_past and self._debug.is_past(fence.looks)
