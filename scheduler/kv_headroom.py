"""Says what would fit into the KV pool, and what would become free. Takes and changes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping

import numpy as np

from ..mem_cache.tree_node import TreeNode
from ..messages.base import I32
from .kv_pool import KVPool
from .memory_terms import NO_RESERVE, Reserve
from .req import Req, hold_of
from .tiers import Tiers


class KVHeadroom:
    """Memory of the pool that requests could still get, by pool and host tier."""

    def __init__(self, pool: KVPool, tiers: Tiers) -> None:
        self._pool = pool
        self._host = tiers.host

    def needs(self, reqs: Mapping[Req, int]) -> Reserve:
        """Return what requests without memory take, each with this many tokens of a prefix that takes none."""
        slots = window_pages = rows = 0
        for req, shared in reqs.items():
            slots += self._pool.pages_up(req.known_len) - shared
            window_pages += self._pool.windows.needs(req.most_tokens)
            rows += 1
        return Reserve(slots, window_pages, rows)

    def could_admit(self, req: Req, reserve: Reserve, given: Reserve = NO_RESERVE) -> bool:
        """Return whether ``KVMemory.admit`` would succeed if the memory ``given`` were free besides.

        ``reserve``: what must stay obtainable. A cached prefix that others keep in use takes no more memory. Of an
        incoming request, that is the part that leaves a token to compute.
        """
        return self._fits(req, reserve, given, self._shared_len(req))

    def could_replace(self, victims: Collection[Req], req: Req, reserve: Reserve) -> bool:
        """Return whether ``could_admit`` would be true once ``victims`` had released their memory.

        True is certain. False is not if two of them share a prefix, as it then counts as kept.
        """
        own = {node for victim in victims for node in self._own_nodes(victim)}
        return self._fits(req, reserve, self.gives(victims), self._shared_len(req, own))

    def _shared_len(self, req: Req, but: Collection[TreeNode] = ()) -> int:
        """Return how many tokens of the request are cached and in use; those in the nodes ``but`` do not count."""
        return len(_slots_in_use(self._pool, req, but))

    def _fits(self, req: Req, reserve: Reserve, given: Reserve, shared: int) -> bool:
        pool = self._pool
        if pool.free_rows + given.rows <= reserve.rows:
            return False
        short = reserve.window_pages + pool.end.window_pages_leaving - given.window_pages
        if not pool.windows.can_promise(req.most_tokens, short):
            return False
        return pool.pages_up(req.known_len) - shared + reserve.slots <= pool.obtainable + given.slots

    def may_become(self, req: Req, tokens: int) -> bool:
        """Return whether the request may have ``tokens`` tokens without more window pages than were reserved for it.

        True if it has no memory yet.
        """
        return req.hold is None or req.hold.window.promised >= self._pool.windows.needs(tokens)

    def could_promise_one_more(self, req: Req, given: int = 0) -> bool:
        """Return whether window pages suffice for ``req`` and, besides, for one request with the longest possible need.

        ``given``: window pages that count as free in addition.
        """
        windows = self._pool.windows
        return windows.can_promise(req.most_tokens, windows.most + self._pool.end.window_pages_leaving - given)

    def growable(self, reqs: list[Req]) -> list[Req]:
        """Return those of ``reqs`` that can have one more slot as far as window pages go.

        The others have to wait until a hand-over releases the window pages that it keeps. All can grow if none are
        kept.
        """
        windows = self._pool.windows
        if not windows.kept:
            return reqs
        holds = [hold_of(req) for req in reqs]
        able = windows.growable([hold.window for hold in holds], [hold.kv_len for hold in holds])
        return [req for req, is_able in zip(reqs, able, strict=True) if is_able]

    def is_pinned(self, req: Req) -> bool:
        """Return whether another user, a hand-over or a migration, keeps the memory after the request releases it."""
        return hold_of(req).pins > 1

    def private_len(self, req: Req) -> int:
        """Return how many tokens of pool memory become free when the request releases it; 0 if a hand-over pins it.

        They are the cached tokens that no other request uses, and all that are not cached.
        """
        hold = hold_of(req)
        if self.is_pinned(req):
            return 0
        return hold.kv_len - hold.cached_len + sum(node.num_tokens for node in self._own_nodes(req))

    @staticmethod
    def _own_nodes(req: Req) -> Iterator[TreeNode]:
        """Return the nodes of the prefix cache that only this request keeps in use, from the last one up."""
        return itertools.takewhile(lambda node: node.lock_ref <= 1, hold_of(req).node.path_up())

    def kept_len(self, req: Req) -> int:
        """Return how many of its first tokens host memory can keep if the request is retracted, so that they need no
        recompute.
        """
        if not hold_of(req).verified:
            return 0
        pages = min(req.computed, req.known_len) // self._pool.page_size
        return min(pages, self._host.num_pages) * self._pool.page_size

    def gives(self, reqs: Iterable[Req]) -> Reserve:
        """Return the slots, window pages and rows that become free, at least, if these requests release theirs."""
        given = NO_RESERVE
        for req in (req for req in reqs if not self.is_pinned(req)):
            slots = self._pool.pages_up(self.private_len(req))
            given = given.plus(Reserve(slots, hold_of(req).window.committed, rows=1))
        return given


class PrefixesInUse:
    """Counts the cached prefixes that others keep in use, of requests that are to get memory one after the other.

    A page counts once, for the first request that would share it. If no request uses it any more, it becomes
    obtainable once. So all of the requests still fit if it is evicted before they get their memory.
    """

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._is_counted = np.zeros(pool.allocator.most_pages + 1, dtype=np.bool_)
        """Whether each page was counted for a request, [P]."""

    def add(self, req: Req) -> int:
        """Return how many tokens of the request's prefix are in use and were not counted before. Count them.

        It is 0 with windowed layers: a prefix in use may become useless for others when the windows move on.
        """
        if self._pool.has_windows:
            return 0
        size = self._pool.page_size
        pages = _slots_in_use(self._pool, req)[::size] // size
        new = len(pages) - int(np.count_nonzero(self._is_counted[pages]))
        self._is_counted[pages] = True
        return new * size


def _slots_in_use(pool: KVPool, req: Req, but: Collection[TreeNode] = ()) -> I32:
    """Return the slots of the request's cached prefix that others keep in use, without those in the nodes ``but``."""
    return pool.cache.peek_pinned(req.token_ids[: req.longest_reusable_prefix], req.msg.extra_key, but)
