"""The memory of requests, from admission to their end.

A request's memory is taken once, for everything it has to compute (``admit``), and grows by one slot a decode step
(``grow``). It is freed as a whole after its last use. The request releases it by ``finish``. A hand-over pins it as
long as its peer may read or write it (``pinned_memory.py``). The two releases come in either order. Its prefix stays
cached if its KV is verified. Cached prefixes that no request uses are evicted when slots run short.

Where layers have windows, the pages before a window are freed while a request runs (``mem_cache/window_pages.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..mem_cache.base_prefix_cache import KVHold, PrefixMatch, Rewrite
from ..mem_cache.radix_cache import TreeWatcher
from ..mem_cache.window_pages import Windows
from ..messages.base import I32
from ..messages.kv_debug import PagesHashed
from .kv_debug import Debug, NoDebug, Place
from .kv_headroom import KVHeadroom
from .kv_pool import KVPool, make_windows
from .memory_terms import PoolSizes, Reserve
from .options import SchedulerOptions
from .pinned_memory import PinnedMemory
from .req import Loading, Req, hold_of
from .tiers import NoTiers, Tiers


class KVMemory:
    """What requests have in the pool, in the other tiers, and of each other; see the module.

    ``windows``: made of the options and sizes unless given. ``watchers``: of the prefix tree.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        sizes: PoolSizes,
        context_length: int,
        windows: Windows | None = None,
        tiers: Tiers | None = None,
        debug: Debug | None = None,
        watchers: Sequence[TreeWatcher] = (),
    ) -> None:
        self.tiers, self.debug = tiers or NoTiers(), debug or NoDebug()
        windows = windows or make_windows(options, sizes)
        self.pool = KVPool(options, sizes, context_length, windows, watchers)
        self.headroom = KVHeadroom(self.pool, self.tiers)
        self.pinned = PinnedMemory(self.pool, self.tiers, self.debug)
        self._worth = -1 if options.schedule_low_priority_values_first else 1

    def prefix_len(self, req: Req) -> int:
        """Return how many tokens of the request are cached now. Takes nothing, and does not count as a use."""
        return self.pool.cached_len(req.token_ids[: req.longest_reusable_prefix], req.msg.extra_key)

    def admit(self, req: Req, reserve: Reserve, *, prefix_limit: int, verified: bool = True) -> bool:
        """Take a request row, the cached prefix (at most ``prefix_limit`` tokens) and slots for the rest of the known
        tokens.

        ``reserve`` stays obtainable for others. Return False, with nothing changed, if row, slots or window pages are
        short. Set ``req.hold`` and ``req.computed``, which includes what comes from host memory. ``verified`` is False
        for KV that a peer will write; the hold's own flag turns True when the KV has been checked.
        """
        pool = self.pool
        cache, windows = pool.cache, pool.windows
        if pool.free_rows <= reserve.rows:
            return False
        match = cache.match_prefix(req.token_ids[:prefix_limit], req.msg.extra_key)
        cached = len(match.slots)
        cache.inc_lock_ref(match.node)
        need = pool.pages_up(req.known_len) - cached
        fits = need + reserve.slots <= pool.obtainable
        fits = fits and windows.can_promise(req.most_tokens, reserve.window_pages + pool.end.window_pages_leaving)
        row = pool.table.alloc() if fits else None
        if row is not None:
            req.hold = cache.hold(row, match, req.msg.extra_key, self._worth * req.msg.priority)
            req.hold.verified, req.hold.page_hashes = verified, req.page_hashes
            pool.holds.add(req.hold)
            windows.promise(req.hold.window, req.most_tokens)
            req.computed = req.reused = cached
            self.look(req, cached, Place.REUSE)
            self._extend_and_load(req, req.hold, prefix_limit, match)
        cache.dec_lock_ref(match.node)
        return row is not None

    def _extend_and_load(self, req: Req, hold: KVHold, limit: int, match: PrefixMatch) -> None:
        tiers, cached = self.tiers, req.computed
        found = tiers.find(req, cached, limit)
        # Pages saved meanwhile must not overwrite what the request is about to read.
        tiers.host.pin(found)
        self.pool.extend(hold, req.known_len)
        # A peer's KV follows what is cached here, so all of that is loaded at once.
        count = tiers.copies.pace.take(len(found), self.pool.windows.groups) if hold.verified else len(found)
        self.load(req, found[:count])
        if count < len(found):
            until = req.computed + (len(found) - count) * self.pool.page_size
            req.loading = Loading(until, is_hit=not req.times.admitted)
        tiers.host.unpin(found)
        if cached:
            tiers.used(req, match.slots, match.node.hit_count)

    def load_more(self, req: Req) -> int:
        """Load the next pages of a prefix that did not fit into one step. Return the tokens loaded.

        ``req.loading`` becomes None when that was all, or when host memory has evicted the rest.
        """
        tiers, loading = self.tiers, req.loading
        if loading is None:
            return 0
        before, size = req.computed, self.pool.page_size
        count = tiers.copies.pace.take((loading.until - before) // size, self.pool.windows.groups)
        found = tiers.find(req, before, before + count * size)
        self.load(req, found, more=True)
        if len(found) < count or req.computed >= loading.until:
            req.loading = None
        return req.computed - before

    def load(self, req: Req, found: list[int], *, more: bool = False) -> None:
        """Copy the pages ``found`` of host memory to the positions after the request's ``computed`` tokens, and raise
        ``computed``.

        The copies are only planned: the worker makes them before the next step. ``more``: pages of this prefix were
        loaded before.
        """
        hold, cached, pool = hold_of(req), req.computed, self.pool
        if not found:
            return
        req.computed = cached + len(found) * pool.page_size
        pool.move_window(hold, req.computed, req.computed)
        brought = self.tiers.load(req, cached, found, pool.pages(hold, cached, req.computed), more=more)
        self.look(req, req.computed, Place.HOST, brought)

    def grow(self, reqs: Sequence[Req]) -> I32 | None:
        """Take one more slot for each request, in order, and return the slots.

        Return None, with nothing changed, if slots are short even after eviction.
        """
        pool = self.pool
        holds = [hold_of(r) for r in reqs]
        rows = np.fromiter((h.row for h in holds), dtype=np.int64, count=len(holds))
        lens = np.fromiter((h.kv_len for h in holds), dtype=np.int32, count=len(holds))
        needed = int(np.count_nonzero(lens % pool.page_size == 0)) * pool.page_size
        if needed and not pool.make_room(needed):
            return None
        slots = pool.allocator.alloc_decode(lens + 1, pool.table.table[rows, lens - 1])
        assert slots is not None
        pool.table.table[rows, lens] = slots
        for hold in holds:
            hold.kv_len += 1
        for hold in pool.windows.outgrown(holds):
            pool.move_window(hold, hold.kv_len - 1, hold.kv_len)
        return slots

    def extend(self, req: Req) -> bool:
        """Take slots up to the request's known tokens. Return False, with nothing changed, if slots are short."""
        hold, pool = hold_of(req), self.pool
        if not pool.make_room(pool.pages_up(req.known_len) - pool.pages_up(hold.kv_len)):
            return False
        pool.extend(hold, req.known_len)
        return True

    def share(self, req: Req, computed: int) -> Rewrite | None:
        """Cache the request's first ``computed`` tokens, so that other requests find them.

        Return the row positions that have other slots now, because equal pages were cached already; None if there are
        none.
        """
        copies = self.tiers.copies
        mark = copies.mark()
        rewrite = self.pool.share(hold_of(req), req.known_tokens(computed))
        copies.defer(mark)
        self.look(req, computed, Place.PREFILL)
        return rewrite

    def finish(self, req: Req) -> None:
        """Release the request's memory. Its pages are free or cached once hand-overs that pin the memory have released
        it, too.
        """
        hold = hold_of(req)
        self.look(req, min(req.computed, hold.kv_len), Place.PREFILL, planned=False)
        req.hold = req.loading = None
        hold.left = req.known_tokens(min(req.computed, hold.kv_len))
        self.pinned.unpin(hold)

    def give_way(self, req: Req) -> None:
        """Release the memory of a request that is retracted, and save its KV in host memory first, as far as there is
        room.

        What is not saved or cached will be recomputed.
        """
        hold = hold_of(req)
        if kept := self.headroom.kept_len(req):
            self.tiers.keep(req, self.pool.pages(hold, 0, kept))
        self.finish(req)

    def condemn(self, req: Req, start: int | None = None) -> None:
        """Remove bad KV of the request, from position ``start`` on, from the cache, so that no other request finds it.

        ``start`` is None if the position is unknown, since the logits are not finite. Then KV that proved good for
        other requests stays. One prompt that breaks the model must not empty the cache of all that begin like it.
        """
        if start is None:
            if req.condemned:
                return  # a step that was under way found this once more
            req.condemned = True
        pool = self.pool
        pool.cache.prove(pool.holds)
        if req.hold is not None:
            req.hold.verified = False
        pool.losses += 1
        kept = pool.cache.condemn(req.known_tokens(req.known_len), req.msg.extra_key, req.hold, start)
        self.tiers.condemned(req, kept)

    def flush(self) -> int:
        """Drop every cached prefix that no request uses, here and in the other tiers. Return the tokens dropped from
        the pool.
        """
        self.pool.losses += 1
        self.tiers.flush()
        return self.pool.cache.reset()

    def empty(self) -> int:
        """Evict every cached prefix while no request holds memory. Return the dropped tokens.

        Saves of a host tier must be sent before the pool is overwritten (``PoolCopies.take_before``).
        """
        self.debug.flush()
        dropped = self.pool.cache.evictable_size()
        is_empty = self.pool.make_room(self.pool.max_total_tokens)
        assert is_empty, "requests hold memory of a pool that is to be empty"
        return dropped

    # --- hash checks ---

    def pages_with_kv(self, req: Req | None, tokens: I32, extra_key: str) -> I32:
        """Return the pages that hold the KV of ``tokens``: those of ``req`` if it has memory, otherwise cached ones.

        Only a first part of the pages may be there; none is if the KV of ``req`` is unverified. ``tokens`` are whole
        pages, computed by steps that were sent. The pages may get other owners after this tick.
        """
        if req is not None and req.hold is not None:
            return self.pool.pages(req.hold, 0, len(tokens)) if req.hold.verified else np.empty(0, dtype=np.int32)
        size = self.pool.page_size
        found: I32 = self.pool.cache.match_prefix(tokens, extra_key).slots[::size] // size
        return found

    def look(self, req: Req, end: int, place: Place, brought: Iterable[bytes] = (), *, planned: bool = True) -> None:
        """Have the worker hash the request's whole pages before token ``end``, if ``--kv-debug`` is on. See
        ``KVDebug.look``.
        """
        self.debug.look(place, req, self.pool.table.table, end, planned=planned, brought=brought)

    def on_hashed(self, event: PagesHashed, now: float) -> None:
        """Compare the hashes of pages that the worker has computed, and condemn the KV that is wrong."""
        for req, start in self.debug.on_hashed(event, now):
            self.condemn(req, start)

    def check_invariants(self, users: Iterable[KVHold]) -> None:
        """Check that pool and host tier account for every page, and that ``users`` are the holders of all pins.

        Raises ``InvariantViolation``.
        """
        self.pool.check_invariants(users)
        self.tiers.host.check_invariants()
