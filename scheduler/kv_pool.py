"""The instance's KV pool: request rows, slots, and the prefixes cached in them.

Pages are freed as soon as the scheduler plans without them, while steps that were already sent may still touch them.
That is sound because the worker runs steps in order: the next owner of a page writes it in a later step. A *remote*
writer is not in that order. So ``disaggregation/handover/receiver_table.py`` waits for the steps up to ``let_go_step``
before it offers fresh pages to a peer. Steps that were sent since touch only what is still in use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from ..mem_cache.allocator import PagedTokenToKVPoolAllocator
from ..mem_cache.base_prefix_cache import KVHold, Rewrite
from ..mem_cache.factory import make_prefix_cache
from ..mem_cache.invariants import require
from ..mem_cache.pool_end import PoolEnd
from ..mem_cache.radix_cache import TreeWatcher
from ..mem_cache.req_to_token_pool import ReqToTokenPool
from ..mem_cache.window_pages import NoWindows, WindowPages, Windows
from ..messages.base import I32
from .memory_terms import PoolSizes, usage
from .options import SchedulerOptions
from .req import Req, hold_of

USUAL_PIECE = 512
"""Assumed tokens of a prompt piece if the options set no ``chunked_prefill_size``."""

Stored = Callable[[str, I32, int], None]
"""Called with (namespace, tokens, start) when the whole pages of ``tokens`` are cached.

``[0, start)`` of them were cached before.
"""


class KVPool:
    """Owner of every row and slot of the instance. ``windows``: see ``make_windows``."""

    def __init__(
        self,
        options: SchedulerOptions,
        sizes: PoolSizes,
        context_length: int,
        windows: Windows,
        watchers: Sequence[TreeWatcher] = (),
    ) -> None:
        self.page_size = options.page_size
        self.windows = windows
        self.allocator = PagedTokenToKVPoolAllocator(max(sizes.tokens, sizes.most), options.page_size, windows)
        # An output's last token may be computed once too often while its end is not known yet: room for two more.
        self.table = ReqToTokenPool(options.max_running_requests, context_length + 2)
        self.cache = make_prefix_cache(options, self.allocator, self.table, watchers)
        self.holds: set[KVHold] = set()
        self.end = PoolEnd(self.cache, self.holds)
        self.newest_step = 0
        """Number of the newest planned step. It and the steps before it may touch all memory that is in use now."""
        self.let_go_step = 0
        """The newest step when memory was last released. Later steps do not touch memory that can be allocated now."""
        self.losses = 0
        """How often cached prefixes were lost. Between two equal readings no prefix has become shorter."""
        self._stored: list[Stored] = []
        if sizes.tokens < self.max_total_tokens:
            self.resize(sizes.tokens)

    @property
    def max_total_tokens(self) -> int:
        """Size of the pool in tokens."""
        return self.allocator.size

    @property
    def obtainable(self) -> int:
        """Slots that are free or can be made free by eviction."""
        return self.allocator.available_size() + self.cache.evictable_size()

    @property
    def num_rows(self) -> int:
        """Number of requests that can have memory at the same time."""
        return len(self.table.table)

    @property
    def free_rows(self) -> int:
        """How many more requests can have memory now, as far as rows go."""
        return self.table.available_size()

    @property
    def has_windows(self) -> bool:
        """Whether a cached prefix may be useless because the window before its end is gone."""
        return self.windows.groups > 1

    def pages_up(self, tokens: int) -> int:
        """Return ``tokens`` rounded up to whole pages, in tokens."""
        return -(-tokens // self.page_size) * self.page_size

    def cached_len(self, tokens: I32, extra_key: str) -> int:
        """Return how many tokens the longest cached prefix of ``tokens`` has in the namespace ``extra_key``.

        Only whole pages that a request can continue from count. This does not count as a use of the prefix.
        """
        return self.cache.peek(tokens, extra_key)

    def slots(self, req: Req, start: int, end: int) -> I32:
        """Return the slots of positions ``[start, end)`` of a request."""
        return self.table.table[hold_of(req).row, start:end]

    def pages(self, hold: KVHold, start: int, end: int) -> I32:
        """Return the numbers of the pages that hold positions ``[start, end)``; ``start`` is page-aligned."""
        pages: I32 = self.table.table[hold.row, start : end : self.page_size] // self.page_size
        return pages

    def watch_stored(self, watcher: Stored) -> None:
        """Have ``watcher`` called with namespace, tokens and first new position whenever more pages are cached."""
        self._stored.append(watcher)

    def make_room(self, tokens: int) -> bool:
        """Evict until ``tokens`` slots are free. Return False, with nothing changed, if they are not obtainable."""
        short = tokens - self.allocator.available_size()
        if short > 0:
            if short > self.cache.evictable_size():
                return False
            self.losses += 1
            self.cache.evict(short)
        return tokens <= self.allocator.available_size()

    def extend(self, hold: KVHold, seq_len: int) -> None:
        """Take slots for positions ``[hold.kv_len, seq_len)``. The caller has made sure that they are obtainable."""
        need = self.pages_up(seq_len) - self.pages_up(hold.kv_len)
        last = int(self.table.table[hold.row, hold.kv_len - 1]) if hold.kv_len else 0
        slots = self.allocator.alloc_extend(hold.kv_len, seq_len, last) if self.make_room(need) else None
        if slots is None:
            raise AssertionError(f"{need} slots were obtainable and are not")
        self.table.table[hold.row, hold.kv_len : seq_len] = slots
        hold.kv_len = seq_len

    def move_window(self, hold: KVHold, start: int, end: int) -> None:
        """Give back the window pages before the window of position ``start``, and take some for positions ``[start,
        end)``.

        Do nothing without windowed layers. ``hold``: the request's memory.
        """
        begin = hold.window.begin
        self.windows.move(hold.window, self.table.table[hold.row], start, end)
        if hold.window.begin > begin:
            # Steps up to this one may still read the pages that have just left: no peer may write them before.
            self.let_go_step = self.newest_step

    def share(self, hold: KVHold, tokens: I32) -> Rewrite | None:
        """Cache ``tokens``, the ids that the hold begins with, so that other requests find their KV.

        Return the row positions that have other slots now, because equal pages were cached already; None if there are
        none.
        """
        before = hold.cached_len
        rewrite = self.cache.cache_unfinished_req(hold, tokens)
        if rewrite is not None:
            self.let_go_step = self.newest_step
        self._tell_stored(hold, tokens, before)
        return rewrite

    def release(self, hold: KVHold, left: I32) -> None:
        """Free all memory of the hold. KV of its first tokens, ``left``, stays cached if it is verified."""
        self.holds.remove(hold)
        self.let_go_step = self.newest_step
        before = hold.cached_len
        self.cache.cache_finished_req(hold, left)
        self._tell_stored(hold, left, before)

    def _tell_stored(self, hold: KVHold, tokens: I32, before: int) -> None:
        if hold.cached_len > before:
            for stored in self._stored:
                stored(hold.extra_key, tokens[: hold.cached_len], before)

    def resize(self, tokens: int) -> None:
        """Change how many tokens the pool hands out to ``tokens``; cached prefixes beyond the new end are evicted.

        Pages that requests use beyond it stay until these release them. Evicted pages may have to be saved before the
        worker overwrites them (``KVMemory.empty``).
        """
        self.losses += 1
        self.end.move(tokens)

    def usage(self) -> dict[str, int]:
        """Return the use of the pool in tokens (total, free, cached, in use), of window pages and of request rows."""
        return usage(self.allocator, self.cache.evictable_size(), self.table)

    def check_invariants(self, users: Iterable[KVHold]) -> None:
        """Check that every page exists exactly once, and that ``users`` lists each hold as often as it is pinned.

        Raises ``mem_cache.errors.InvariantViolation``.
        """
        self.cache.check_invariants(self.holds)
        pins = {hold: hold.pins for hold in self.holds}
        require(pins == Counter(users), f"pins {list(pins.values())} are not those of requests and hand-overs")


def make_windows(options: SchedulerOptions, sizes: PoolSizes) -> Windows:
    """Make the bookkeeping of window pages, or one that does nothing for a model without windowed layers."""
    if not sizes.window:
        return NoWindows()
    page_size = options.page_size
    piece = max(options.chunked_prefill_size or USUAL_PIECE, page_size) // page_size
    slack = min(piece, sizes.window_tokens // page_size // 4)
    most = max(sizes.tokens, sizes.most) // page_size
    return WindowPages(sizes.window, sizes.window_tokens, most, page_size, slack)
