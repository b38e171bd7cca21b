"""The scheduler's memory: one interface to request rows, slots and cached prefixes.

A request's memory is taken once, for everything it has to compute (``admit``), and grows by one slot a decode step
(``grow``). It is freed as a whole after its last use. The request releases it by ``finish``. A hand-over pins it as
long as its peer may read or write it, and releases it by ``unpin``. The two come in either order. Its prefix stays
cached if its KV is verified. Cached prefixes that no request uses are evicted when slots run short.

Pages are freed as soon as the scheduler plans without them, while steps that were already sent may still touch them.
That is sound because the worker runs steps in order: the next owner of a page writes it in a later step. A *remote*
writer is not in that order. So ``disaggregation/handover/receiver_table.py`` waits for the steps up to ``let_go_step``
before it offers fresh pages to a peer. Steps that were sent since touch only what is still in use.

Where layers have windows, the pages before a window are freed while a request runs (``mem_cache/window_pages.py``). The
planner of a prompt's piece asks how long it may be (``chunk_room``) and reports what it has become (``move_window``).
What a hand-over moves of a row is a ``PageRun``: its pages of each group.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ..mem_cache.allocator import PagedTokenToKVPoolAllocator
from ..mem_cache.base_prefix_cache import KVHold, PrefixMatch, Rewrite, require_live
from ..mem_cache.errors import WindowPagesShort
from ..mem_cache.factory import make_prefix_cache
from ..mem_cache.invariants import require
from ..mem_cache.kv_events import KVEventLog
from ..mem_cache.page_run import PageRun
from ..mem_cache.pool_end import PoolEnd
from ..mem_cache.req_to_token_pool import ReqToTokenPool
from ..mem_cache.window_pages import WindowPages
from ..messages.base import I32, pack_i32
from .kv_debug import KVDebug, Place
from .memory_terms import NO_RESERVE, Fence, PoolSizes, Reserve, usage
from .options import SchedulerOptions
from .req import Loading, Req
from .tiers import KVTiers

USUAL_PIECE = 512
"""Assumed tokens of a prompt piece if the options set no ``chunked_prefill_size``."""


class KVMemory:
    """Owner of every row and slot of the instance. The module describes the life of a request's memory."""

    def __init__(
        self,
        options: SchedulerOptions,
        sizes: PoolSizes,
        context_length: int,
        tiers: KVTiers | None = None,
        events: KVEventLog | None = None,
        debug: KVDebug | None = None,
    ) -> None:
        self.page_size = page_size = options.page_size
        self.tiers, self.debug = tiers, debug
        self.max_total_tokens = most = max(sizes.tokens, sizes.most)
        self._windows: WindowPages | None = None
        if sizes.window:
            piece = max(options.chunked_prefill_size or USUAL_PIECE, page_size) // page_size
            slack = min(piece, sizes.window_tokens // page_size // 4)
            self._windows = WindowPages(sizes.window, sizes.window_tokens, most // page_size, page_size, slack)
        if tiers is not None:
            tiers.windows = self._windows
        if debug is not None:
            debug.windows, debug.condemn = self._windows, self.condemn
        self._allocator = PagedTokenToKVPoolAllocator(most, page_size, self._windows)
        # An output's last token may be computed once too often while its end is not known yet: room for two more.
        self._table = ReqToTokenPool(options.max_running_requests, context_length + 2)
        self._cache = make_prefix_cache(options, self._allocator, self._table, tiers, events)
        self._holds: set[KVHold] = set()
        self.end = PoolEnd(self._cache, self._holds)
        self._worth = -1 if options.schedule_low_priority_values_first else 1
        self.newest_step = 0
        """Number of the newest planned step. It and the steps before it may touch all memory that is in use now."""
        self.let_go_step = 0
        """The newest step when memory was last released. Later steps do not touch memory that can be allocated now."""
        self.losses = 0
        """How often cached prefixes were lost. Between two equal readings no prefix has become shorter."""
        self.on_stored: Callable[[str, I32, int], None] | None = None
        """Called with (namespace, tokens, start) when the whole pages of ``tokens`` are cached.

        ``[0, start)`` of them were cached before.
        """
        if sizes.tokens < most:
            self.resize(sizes.tokens)

    @property
    def obtainable(self) -> int:
        """Slots that are free or can be made free by eviction."""
        return self._allocator.available_size() + self._cache.evictable_size()

    @property
    def num_rows(self) -> int:
        """Number of requests that can have memory at the same time."""
        return len(self._table.table)

    @property
    def free_rows(self) -> int:
        """How many more requests can have memory now, as far as rows go."""
        return self._table.available_size()

    @property
    def has_windows(self) -> bool:
        """Whether a cached prefix may be useless because the window before its end is gone."""
        return self._windows is not None

    def pages_up(self, tokens: int) -> int:
        """Return ``tokens`` rounded up to whole pages, in tokens."""
        return -(-tokens // self.page_size) * self.page_size

    def prefix_len(self, req: Req) -> int:
        """Return how many tokens of the request are cached now. Takes nothing, and does not count as a use."""
        return self.cached_len(req.token_ids[: req.longest_reusable_prefix], req.msg.extra_key)

    def cached_len(self, tokens: I32, extra_key: str) -> int:
        """Return how many of ``tokens`` are cached in the namespace ``extra_key``. Does not count as a use."""
        return self._cache.peek(tokens, extra_key)

    def may_become(self, req: Req, tokens: int) -> bool:
        """Return whether the window pages reserved for the request suffice for ``tokens`` tokens."""
        return self._windows is None or req.hold is None or req.hold.window.promised >= self._windows.needs(tokens)

    def could_promise_one_more(self, req: Req, given: int = 0) -> bool:
        """Return whether window pages suffice for the request and a long one besides, if ``given`` more were free."""
        windows = self._windows
        if windows is None:
            return True
        return windows.can_promise(req.most_tokens, windows.most + self.end.window_pages_leaving - given)

    def needs(self, reqs: Iterable[Req]) -> Reserve:
        """Return what requests without memory take if none of it is found cached."""
        slots = window_pages = rows = 0
        for req in reqs:
            slots += self.pages_up(req.known_len)
            window_pages += self._windows.needs(req.most_tokens) if self._windows is not None else 0
            rows += 1
        return Reserve(slots, window_pages, rows)

    def admit(self, req: Req, reserve: Reserve, *, prefix_limit: int, verified: bool = True) -> bool:
        """Take a row, the cached prefix (at most ``prefix_limit`` tokens) and slots for the rest of the known tokens.

        ``reserve`` is left for others. Returns False, with nothing changed, if row, slots or window pages are short.
        Sets ``req.hold`` and ``req.computed``, which includes what comes from host memory. ``verified`` is False for KV
        that a peer will write; the hold's own flag turns True when the KV has been checked.
        """
        if self._table.available_size() <= reserve.rows:
            return False
        match = self._cache.match_prefix(req.token_ids[:prefix_limit], req.msg.extra_key)
        cached = len(match.slots)
        self._cache.inc_lock_ref(match.node)
        need = self.pages_up(req.known_len) - cached
        most, windows = req.most_tokens, self._windows
        fits = need + reserve.slots <= self.obtainable
        fits = fits and (
            windows is None or windows.can_promise(most, reserve.window_pages + self.end.window_pages_leaving)
        )
        if fits:
            row = self._table.alloc()
            assert row is not None
            req.hold = self._cache.hold(row, match, req.msg.extra_key, self._worth * req.msg.priority)
            req.hold.verified, req.hold.page_hashes = verified, req.page_hashes
            self._holds.add(req.hold)
            if windows is not None:
                windows.promise(req.hold.window, most)
            req.computed = req.reused = cached
            self.look(req, cached, Place.REUSE)
            if self.tiers is None:
                self._extend(req.hold, req.known_len)
            else:
                self._extend_and_load(self.tiers, req, prefix_limit, match)
        self._cache.dec_lock_ref(match.node)
        return fits

    def _extend_and_load(self, tiers: KVTiers, req: Req, limit: int, match: PrefixMatch) -> None:
        hold, cached = self.hold_of(req), req.computed
        found = tiers.find(req, cached, limit)
        # Pages saved meanwhile must not overwrite what the request is about to read.
        tiers.host.pin(found)
        self._extend(hold, req.known_len)
        # A peer's KV follows what is cached here, so all of that is loaded at once.
        count = tiers.pace.take(len(found), self._parts) if hold.verified else len(found)
        self.load(req, found[:count])
        if count < len(found):
            until = req.computed + (len(found) - count) * self.page_size
            req.loading = Loading(until, is_hit=not req.times.admitted)
        tiers.host.unpin(found)
        if cached:
            tiers.used(req, self._pages(hold, 0, cached), match.node.hit_count)

    def load_more(self, req: Req) -> int:
        """Load the next pages of a prefix that did not fit into one step. Return the tokens loaded.

        ``req.loading`` becomes None when that was all, or when host memory has evicted the rest.
        """
        tiers, loading = self.tiers, req.loading
        if tiers is None or loading is None:
            return 0
        before, size = req.computed, self.page_size
        count = tiers.pace.take((loading.until - before) // size, self._parts)
        found = tiers.find(req, before, before + count * size)
        self.load(req, found, more=True)
        if len(found) < count or req.computed >= loading.until:
            req.loading = None
        return req.computed - before

    @property
    def _parts(self) -> int:
        return 1 if self._windows is None else 2

    def copy_ms(self) -> float:
        """Return the time of the copies planned so far: see ``KVTiers.copy_ms``."""
        return self.tiers.copy_ms() if self.tiers is not None else 0.0

    def limit_loads(self, ms: float) -> None:
        """Limit loads from host memory in this plan to those that take at most ``ms`` milliseconds."""
        if self.tiers is not None:
            self.tiers.pace.limit_loads(ms)

    def load(self, req: Req, found: list[int], *, more: bool = False) -> None:
        """Copy these pages of the host after the request's ``computed`` tokens, where nothing has begun to write."""
        tiers, hold, cached = self.tiers, self.hold_of(req), req.computed
        if tiers is None or not found:
            return
        req.computed = cached + len(found) * self.page_size
        if self._windows is not None:
            self._move_window(hold, req.computed, req.computed)
        brought = tiers.load(req, cached, found, self._pages(hold, cached, req.computed), more=more)
        self.look(req, req.computed, Place.HOST, brought)

    def grow(self, reqs: Sequence[Req]) -> I32 | None:
        """Take one more slot for each request, in order, and return the slots.

        Return None, with nothing changed, if slots are short even after eviction.
        """
        holds = [self.hold_of(r) for r in reqs]
        rows = np.fromiter((h.row for h in holds), dtype=np.int64, count=len(holds))
        lens = np.fromiter((h.kv_len for h in holds), dtype=np.int32, count=len(holds))
        needed = int(np.count_nonzero(lens % self.page_size == 0)) * self.page_size
        if needed and not self._make_room(needed):
            return None
        slots = self._allocator.alloc_decode(lens + 1, self._table.table[rows, lens - 1])
        assert slots is not None
        self._table.table[rows, lens] = slots
        for hold in holds:
            hold.kv_len += 1
        if self._windows is not None:
            for hold in holds:
                self._move_on(hold)
        return slots

    def _pages(self, hold: KVHold, start: int, end: int) -> I32:
        """Return the pages of positions ``[start, end)``, whole ones."""
        pages: I32 = self._table.table[hold.row, start : end : self.page_size] // self.page_size
        return pages

    def pages_with_kv(self, req: Req | None, tokens: I32, extra_key: str) -> I32:
        """Return the pages that hold the KV of ``tokens``, as far as they are there: the request's own if it has some,
        else cached ones.

        ``tokens`` are whole pages, computed by steps that were sent. The pages may get other owners after this tick.
        """
        if req is not None and req.hold is not None:
            return self._pages(req.hold, 0, len(tokens)) if req.hold.verified else np.empty(0, dtype=np.int32)
        found: I32 = self._cache.match_prefix(tokens, extra_key).slots[:: self.page_size] // self.page_size
        return found

    def look(self, req: Req, end: int, place: Place, brought: Iterable[bytes] = (), *, planned: bool = True) -> None:
        """Have the request's whole pages before ``end`` hashed, with ``--kv-debug``: see ``KVDebug.look``."""
        if self.debug is not None:
            row = self._table.table[self.hold_of(req).row]
            self.debug.look(place, req, row, end, planned=planned, brought=brought)

    def chunk_room(self, req: Req, start: int) -> int | None:
        """Return how many tokens from position ``start`` on one step may compute, as far as window pages go.

        At least 1; None if there is no limit.
        """
        if self._windows is None:
            return None
        windows, span = self._windows, self.hold_of(req).window
        return (windows.first_page(start) + windows.longest(span)) * self.page_size - start

    def move_window(self, req: Req, start: int, end: int) -> None:
        """Move the request's window to the next step, which computes positions ``[start, end)``.

        These must be within ``chunk_room``.
        """
        if self._windows is not None:
            self._move_window(self.hold_of(req), start, end)

    def _move_window(self, hold: KVHold, start: int, end: int) -> None:
        begin = hold.window.begin
        self._cache.move_window(hold, start, end)
        if hold.window.begin > begin:
            # Steps up to this one may still read the pages that have just left: no peer may write them before.
            self.let_go_step = self.newest_step

    def _move_on(self, hold: KVHold) -> None:
        """Move the window of a decoding request that has just got the slot of its next token.

        That is due when the token begins a page, or when the span is longer than reserved, as after a prompt's last
        piece.
        """
        span = hold.window
        if span.end * self.page_size < hold.kv_len or span.end - span.begin > span.promised:
            self._move_window(hold, hold.kv_len - 1, hold.kv_len)

    def growable(self, reqs: list[Req]) -> list[Req]:
        """Return the requests that can ``grow`` without waiting for a hand-over to release their windows."""
        if self._windows is None or not self._windows.kept:
            return reqs
        holds = [self.hold_of(req) for req in reqs]
        able = self._windows.growable([hold.window for hold in holds], [hold.kv_len for hold in holds])
        return [req for req, is_able in zip(reqs, able, strict=True) if is_able]

    # --- what hand-overs move ---

    def run(self, start: int, end: int, goes_on: int) -> PageRun:
        """Return the pages of positions ``[start, end)`` that are handed over; ``start`` is page-aligned.

        ``goes_on``: the receiver continues in the page of this position, or after it.
        """
        first, last = start // self.page_size, -(-end // self.page_size)
        if self._windows is None:
            return PageRun(first, last)
        return PageRun(first, last, min(max(first, self._windows.first_page(goes_on)), last))

    def pages_in(self, hold: KVHold, run: PageRun, begin: int, end: int) -> list[I32]:
        """Return the pages of a hold's row within ``[begin, end)`` that ``run`` moves, by group.

        Raises ``WindowPagesShort`` if one of them has no window page.
        """
        parts = run.within(begin, end)
        pages = [
            self._table.table[hold.row, a * self.page_size : b * self.page_size : self.page_size] for a, b in parts
        ]
        pages = [slots // self.page_size for slots in pages]
        if self._windows is not None:
            pages[1] = self._windows.page_of[pages[1]]
            if not pages[1].all():
                raise WindowPagesShort(f"row {hold.row}: of pages {parts[1]} some have no window page")
        return pages

    def expect(self, req: Req, length: int, goes_on: int) -> None:
        """Take window pages for the KV that a peer writes of the request's first ``length`` tokens.

        They were reserved when the request was admitted. Steps up to ``let_go_step`` may still touch them.
        """
        if self._windows is not None:
            self._move_window(self.hold_of(req), goes_on, length)

    def keep_window(self, hold: KVHold, run: PageRun) -> bool:
        """Keep the window pages of ``run`` for a hand-over that reads them, until ``let_window_go``.

        The request continues meanwhile. Return False, with nothing changed, if they cannot be kept.
        """
        return run.window is None or self._cache.keep_window(hold, run.window)

    def let_window_go(self, hold: KVHold) -> None:
        """Release window pages kept by ``keep_window``."""
        if self._windows is not None:
            self._windows.let_go(hold.window)

    def take_window_changes(self) -> bytes | None:
        """Return the next step's ``ForwardStep.window_pages``, or None if nothing has changed."""
        changes = self._windows.take_changes() if self._windows is not None else None
        return pack_i32(changes) if changes is not None and changes.size else None

    def extend(self, req: Req) -> bool:
        """Take slots for all known tokens of a request. Return False, with nothing changed, if slots are short."""
        hold = self.hold_of(req)
        if not self._make_room(self.pages_up(req.known_len) - self.pages_up(hold.kv_len)):
            return False
        self._extend(hold, req.known_len)
        return True

    def slots(self, req: Req, start: int, end: int) -> I32:
        """Return the slots of positions ``[start, end)``."""
        return self._table.table[self.hold_of(req).row, start:end]

    def share(self, req: Req, computed: int) -> Rewrite | None:
        """Cache the first ``computed`` tokens for others. Return the row positions with slots that changed thereby."""
        hold, tokens = self.hold_of(req), req.known_tokens(computed)
        before, mark = hold.cached_len, self.tiers.mark() if self.tiers is not None else 0
        rewrite = self._cache.cache_unfinished_req(hold, tokens)
        if self.tiers is not None:
            self.tiers.defer(mark)
        if rewrite is not None:
            self.let_go_step = self.newest_step
        self._tell_stored(hold, tokens, before)
        self.look(req, computed, Place.PREFILL)
        return rewrite

    def _tell_stored(self, hold: KVHold, tokens: I32, before: int) -> None:
        if self.on_stored is not None and hold.cached_len > before:
            self.on_stored(hold.extra_key, tokens[: hold.cached_len], before)

    def finish(self, req: Req) -> None:
        """Release the request's memory. What it computed stays cached after the last user has released the memory."""
        hold = self.hold_of(req)
        self.look(req, min(req.computed, hold.kv_len), Place.PREFILL, planned=False)
        req.hold = req.loading = None
        hold.left = req.known_tokens(min(req.computed, hold.kv_len))
        self.unpin(hold)

    def give_way(self, req: Req) -> None:
        """Release the memory of a request that will be recomputed. The host tier, if there is one, saves its KV."""
        hold = self.hold_of(req)
        if self.tiers is not None and hold.verified:
            self.tiers.keep(req, self._pages(hold, 0, self.kept_len(req)))
        self.finish(req)

    def kept_len(self, req: Req) -> int:
        """Return how many of its first tokens need no recompute if the request is retracted. Changes nothing."""
        if self.tiers is None or not self.hold_of(req).verified:
            return 0
        pages = min(req.computed, req.known_len) // self.page_size
        return min(pages, self.tiers.host.num_pages) * self.page_size

    def pin(self, req: Req) -> KVHold:
        """Keep the request's memory as it is until ``unpin``, even if the request ends before."""
        hold = self.hold_of(req)
        hold.pins += 1
        return hold

    def unpin(self, hold: KVHold) -> None:
        """Release one pin. The last one frees the memory."""
        require_live(hold)
        hold.pins -= 1
        if hold.pins:
            return
        if hold.left is None:
            raise AssertionError(f"the memory in row {hold.row} was released while its request lives")
        self._holds.remove(hold)
        self.let_go_step = self.newest_step
        before = hold.cached_len
        self._cache.cache_finished_req(hold, hold.left)
        self._tell_stored(hold, hold.left, before)

    def condemn(self, req: Req, start: int | None = None) -> None:
        """Hide the request's KV from position ``start`` on in the cache, now and later, because it is bad.

        ``start`` is None if the position is unknown, since the logits are not finite. Then KV that proved good for
        other requests is kept, see ``BasePrefixCache.condemn``. One prompt that breaks the model must not empty the
        cache of all that begin like it.
        """
        if start is None:
            if req.condemned:
                return  # a step that was under way found this once more
            req.condemned = True
        self._cache.prove(self._holds)
        if req.hold is not None:
            req.hold.verified = False
        self.losses += 1
        kept = self._cache.condemn(req.known_tokens(req.known_len), req.msg.extra_key, req.hold, start)
        if self.tiers is not None:
            self.tiers.condemned(req, kept)

    def hold_of(self, req: Req) -> KVHold:
        """Return the request's memory. Raises ``AssertionError`` if it has none."""
        if req.hold is None:
            raise AssertionError(f"request {req.rid} ({req.state}) holds no KV memory")
        return req.hold

    def is_pinned(self, req: Req) -> bool:
        """Return whether another user, a hand-over or a migration, keeps the memory after the request releases it."""
        return self.hold_of(req).pins > 1

    def private_len(self, req: Req) -> int:
        """Return how many tokens of memory are freed with the request.

        These are the cached ones that no other request pins, and all that follow.
        """
        hold = self.hold_of(req)
        if self.is_pinned(req):
            return 0
        own = itertools.takewhile(lambda node: node.lock_ref <= 1, hold.node.path_up())
        return hold.kv_len - hold.cached_len + sum(node.num_tokens for node in own)

    def gives(self, reqs: Iterable[Req]) -> Reserve:
        """Return at least what would be freed if these requests released their memory."""
        given = NO_RESERVE
        for req in (req for req in reqs if not self.is_pinned(req)):
            slots = self.pages_up(self.private_len(req))
            given = given.plus(Reserve(slots, self.hold_of(req).window.committed, rows=1))
        return given

    def could_admit(self, req: Req, reserve: Reserve, given: Reserve = NO_RESERVE) -> bool:
        """Return whether ``admit`` would succeed, if ``given`` were free besides.

        Takes nothing; errs on the side of False.
        """
        if self._table.available_size() + given.rows <= reserve.rows:
            return False
        windows, short = self._windows, reserve.window_pages + self.end.window_pages_leaving - given.window_pages
        if windows is not None and not windows.can_promise(req.most_tokens, short):
            return False
        return self.pages_up(req.known_len) + reserve.slots <= self.obtainable + given.slots

    def flush(self) -> int:
        """Drop every cached prefix that no request uses. Return the dropped tokens of the pool alone."""
        self.losses += 1
        if self.tiers is not None:
            self.tiers.flush()
        return self._cache.reset()

    def empty(self) -> int:
        """Evict every cached prefix while no request holds memory. Return the dropped tokens.

        Saves of a host tier must be sent before the pool is overwritten (``KVTiers.take_before``).
        """
        if self.debug is not None:
            self.debug.flush()
        dropped = self._cache.evictable_size()
        is_empty = self._make_room(self.max_total_tokens)
        assert is_empty, "requests hold memory of a pool that is to be empty"
        return dropped

    def resize(self, tokens: int) -> None:
        """Change the pool's size to ``tokens``: see ``PoolEnd.move``. For saves of what is evicted see ``empty``."""
        self.losses += 1
        self.end.move(tokens)
        self.max_total_tokens = self._allocator.size

    def must_wait(self, req: Req, now: float) -> bool:
        """Return whether a store is about to bring some of the request (``tiers.py``)."""
        return self.tiers is not None and self.tiers.must_wait(req, now)

    def fence(self) -> Fence:
        """Return the latest work that may still touch memory which can be allocated now. Not valid within a plan."""
        copies, looks = self.tiers.fence() if self.tiers is not None else 0, self.debug.newest if self.debug else 0
        return Fence(self.let_go_step, copies, looks)

    def is_past(self, fence: Fence, completed_step: int) -> bool:
        """Return whether all work up to ``fence`` is done."""
        is_past = completed_step >= fence.step and (self.tiers is None or self.tiers.copied >= fence.copies)
        return is_past and (self.debug is None or self.debug.is_past(fence.looks))

    def usage(self) -> dict[str, int]:
        """Return how the pool is used, in tokens: see ``memory_terms.usage``."""
        return usage(self._allocator, self._cache.evictable_size(), self._table)

    def check_invariants(self, users: Iterable[KVHold]) -> None:
        """Check that every page exists exactly once, and that every pin belongs to one of ``users``.

        Raises ``mem_cache.errors.InvariantViolation``.
        """
        self._cache.check_invariants(self._holds)
        if self.tiers is not None:
            self.tiers.check_invariants()
        pins = {hold: hold.pins for hold in self._holds}
        require(pins == Counter(users), f"pins {list(pins.values())} are not those of requests and hand-overs")

    def _extend(self, hold: KVHold, seq_len: int) -> None:
        """Take slots for positions ``[hold.kv_len, seq_len)``. The caller has made sure that they are obtainable."""
        need = self.pages_up(seq_len) - self.pages_up(hold.kv_len)
        if not self._make_room(need):
            raise AssertionError(f"{need} slots were obtainable and are not")
        last = int(self._table.table[hold.row, hold.kv_len - 1]) if hold.kv_len else 0
        slots = self._allocator.alloc_extend(hold.kv_len, seq_len, last)
        assert slots is not None
        self._table.table[hold.row, hold.kv_len : seq_len] = slots
        hold.kv_len = seq_len

    def _make_room(self, tokens: int) -> bool:
        short = tokens - self._allocator.available_size()
        if short > 0:
            if short > self._cache.evictable_size():
                return False
            self.losses += 1
            self._cache.evict(short)
        return tokens <= self._allocator.available_size()
