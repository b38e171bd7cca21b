"""Which computed prefixes are kept, and for whom.

A request's KV, from admission to its end::

    match_prefix ─▶ hold ─▶ (alloc_extend / alloc_decode, row written, hold.kv_len moved on
                               ─▶ cache_unfinished_req)* ─▶ cache_finished_req | release_req

Everything happens when a step is *planned*: a prefix may be in the cache, and be matched by the next request, before
the model worker has computed it. That is sound because the worker runs steps in the order of their plans, and so is
handing out a freed page at once: whoever still writes to it runs before its next owner. Only a user of a page outside
that order (a transfer that reads or writes it) must be waited for before the page is freed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ..messages.base import I32
from .allocator import TokenToKVPoolAllocator
from .errors import StaleHold
from .pages import slots_to_pages
from .req_to_token_pool import ReqToTokenPool
from .tree_node import TreeNode
from .window_pages import WindowSpan


class PrefixMatch(NamedTuple):
    """A cached prefix: its ``slots`` [M] int32 (read-only, M a whole number of pages) and the node that it ends in.

    Valid until the next ``evict``, ``reset``, ``condemn``, ``withdraw``, ``move_window``, ``cache_unfinished_req`` or
    ``cache_finished_req``, unless held.
    """

    slots: I32
    node: TreeNode


class Rewrite(NamedTuple):
    """Row positions ``start …`` now live in ``slots`` [N] int32. The model worker's table must follow."""

    start: int
    slots: I32


@dataclass(slots=True, eq=False)
class KVHold:
    """What one request holds, and whoever else still uses it.

    Positions ``[0, cached_len)`` of its row are the cache's slots, pinned by the lock on ``node``, which ends at
    ``cached_len`` (page-aligned). ``[cached_len, kv_len)`` belong to the request alone: the scheduler writes them to
    the row and moves ``kv_len`` on as it allocates. ``live`` turns False when the hold is given back.

    ``verified``: whether its KV is what it should be. False while a peer may still write it, and for good where it is
    known to be bad: none of it is shared then. ``proven``: of how many tokens the KV has given a token, sampled here
    from finite logits. ``window``: which of its pages it uses in the window pool, where there is one
    (``window_pages.py``). ``pins`` and ``left`` are ``KVMemory``'s: how many use it, and the tokens of a request that
    is over, whose prefix may stay when the last one lets go. ``created``: when it began, by the tree's clock.
    ``priority``: of the request, higher is dearer; what it shares or found is worth that much to the eviction policy of
    that name. ``hashed``: of so many tokens the pages were looked at (``scheduler/kv_debug.py``). ``page_hashes``: of
    its first pages, as far as somebody has asked (``page_hash.py``). The request has the same list.
    """

    row: int
    extra_key: str
    node: TreeNode
    cached_len: int
    kv_len: int
    live: bool = True
    verified: bool = True
    window: WindowSpan = field(default_factory=WindowSpan)
    pins: int = 1
    left: I32 | None = None
    proven: int = 0
    created: int = 0
    priority: int = 0
    hashed: int = 0
    page_hashes: list[bytes] = field(default_factory=list)


class BasePrefixCache(ABC):
    """A prefix cache over one allocator and one request table. Sizes are in tokens."""

    def __init__(self, allocator: TokenToKVPoolAllocator, req_to_token: ReqToTokenPool) -> None:
        self.allocator = allocator
        self.req_to_token = req_to_token
        self.page_size = allocator.page_size

    @abstractmethod
    def match_prefix(self, tokens: I32, extra_key: str = "") -> PrefixMatch:
        """The longest cached, page-aligned prefix of ``tokens`` [N] in the namespace ``extra_key``, of those whose last
        window is cached, too, where layers have windows.

        Counts as a use of the nodes on its path and may split one; changes no size, lock or page. A caller that must
        compute at least one token asks for ``tokens[:-1]``. Pins nothing: ``hold`` the match before making room.
        """

    @abstractmethod
    def peek(self, tokens: I32, extra_key: str = "") -> int:
        """The length of what ``match_prefix`` would find. Changes nothing, and does not count as a use."""

    @abstractmethod
    def insert(self, tokens: I32, slots: I32, extra_key: str = "", priority: int = 0) -> int:
        """Offer ``slots`` [N], which hold the KV of ``tokens`` [N]; N is a whole number of pages.

        Returns K: ``slots[:K]`` stay the caller's, since the cache has that prefix elsewhere or keeps nothing;
        ``slots[K:]`` are the cache's from now on. For pages outside a ``KVHold``. Raises ``UnalignedLength``.
        """

    @abstractmethod
    def inc_lock_ref(self, node: TreeNode) -> None:
        """Pin ``node`` and its ancestors. Raises ``UnbalancedLock`` when it has left the tree."""

    @abstractmethod
    def dec_lock_ref(self, node: TreeNode) -> None:
        """Undo one ``inc_lock_ref``. Raises ``UnbalancedLock`` when there is none to undo."""

    @abstractmethod
    def evict(self, num_tokens: int) -> int:
        """Give the allocator at least ``num_tokens`` slots of unlocked prefixes, or all of them if they are fewer.

        Returns how many. Invalidates every match that is not held.
        """

    @abstractmethod
    def evictable_size(self) -> int:
        """Cached tokens that no request pins."""

    @abstractmethod
    def protected_size(self) -> int:
        """Cached tokens that some request pins."""

    def total_size(self) -> int:
        """Cached tokens."""
        return self.evictable_size() + self.protected_size()

    @abstractmethod
    def hold(self, row: int, match: PrefixMatch, extra_key: str, priority: int = 0) -> KVHold:
        """Lock ``match``, which came from ``match_prefix(…, extra_key)``, and write its slots to ``row``.

        ``row`` (from ``ReqToTokenPool.alloc``) is the hold's from now on. Raises ``StaleMatch``; changes nothing then.
        """

    @abstractmethod
    def cache_unfinished_req(self, hold: KVHold, tokens: I32) -> Rewrite | None:
        """Share what a running request has: ``tokens`` are the ids whose KV the steps planned so far compute.

        Their page-aligned part enters the cache and is pinned for the request (``hold.node`` and ``cached_len`` move
        on). Pages of it that the cache got from elsewhere meanwhile are freed and replaced in the row: that is
        the ``Rewrite`` returned, None when nothing was replaced. ``tokens[:cached_len]`` must be what was matched or
        cached before. Raises ``StaleHold``, also when ``tokens`` are more than ``kv_len``; nothing is changed then.
        Nothing is shared of a hold that isn't ``verified``, nor behind a prefix that was condemned or withdrawn, nor
        from a page on that lies beyond the pool's end.
        """

    @abstractmethod
    def prove(self, holds: Iterable[KVHold]) -> None:
        """Note that all that these share is good, of those whose ``proven`` tells so."""

    @abstractmethod
    def condemn(self, tokens: I32, extra_key: str = "", hold: KVHold | None = None, start: int | None = None) -> int:
        """Hide the KV of ``tokens`` [N] from position ``start`` on, which is bad, and all that follows it: no request
        finds it any more, and the pages go back as soon as no request pins them. ``hold`` is that of the request which
        was found to have it; without one, what is cached of ``tokens`` is meant.

        ``start`` None: nobody knows where it begins. Then what is proven is kept, since it was good for others, but
        counts as proven no more: if the next request that begins with it fails as well, it is hidden, too. A failure
        behind what is hidden already says nothing new.

        Returns how many of the first tokens are kept.
        """

    @abstractmethod
    def withdraw(self) -> None:
        """The pool has become smaller: no request finds pages beyond its end any more, nor what follows them. What
        nobody pins goes back, the rest as soon as no request pins it.
        """

    def cache_finished_req(self, hold: KVHold, tokens: I32) -> None:
        """Share what a request leaves behind, as ``cache_unfinished_req`` does, and give back the rest.

        Frees ``[aligned part of tokens, kv_len)`` and the row, unlocks the node, ends the hold. Raises ``StaleHold``.
        """
        self.cache_unfinished_req(hold, tokens)
        self.release_req(hold)

    def release_req(self, hold: KVHold) -> None:
        """Give back all that a request holds and keep nothing new of it: it failed, was aborted or retracted.

        Frees ``[cached_len, kv_len)`` and the row, unlocks the node and ends the hold. Raises ``StaleHold``.
        """
        require_live(hold)
        hold.live = False
        if (windows := self.allocator.windows) is not None:
            windows.leave(hold.window, self._pages(hold, hold.window.begin, hold.window.end))
            windows.end(hold.window)
        self.allocator.free(self.req_to_token.table[hold.row, hold.cached_len : hold.kv_len])
        self.req_to_token.free(hold.row)
        self.dec_lock_ref(hold.node)

    def move_window(self, hold: KVHold, start: int, end: int) -> None:
        """What is written next of the request is positions ``[start, end)``, which have slots, by a step or, from a
        later page on, by a peer: let go of the window pages that none of these sees, and take some for those that have
        none. Only where layers have windows.

        Raises ``WindowPagesShort`` where these are more than ``WindowPages.longest``.
        """
        windows, span = self.allocator.windows, hold.window
        assert windows is not None
        first, last = windows.first_page(start), -(-end // self.page_size)
        if span.kept_from is not None:
            first = min(first, span.kept_from)
        if first > span.begin:
            windows.leave(span, self._pages(hold, span.begin, min(first, span.end)))
        if first > span.end:
            windows.skip(span, first)
        if last > span.end:
            windows.extend(span, self._pages(hold, span.end, last))

    def keep_window(self, hold: KVHold, first: int) -> bool:
        """A hand-over reads the window pages of the hold's row from page ``first`` on, until ``let_window_go``: they
        stay its own however far the request moves on. False, with nothing changed, where some are gone or are others'
        to count on. Only where layers have windows.
        """
        windows = self.allocator.windows
        assert windows is not None
        return windows.keep(hold.window, first, self._pages(hold, first, hold.window.begin))

    def _pages(self, hold: KVHold, begin: int, end: int) -> I32:
        """Pages ``[begin, end)`` of the hold's row."""
        row: I32 = self.req_to_token.table[hold.row]
        return slots_to_pages(row[begin * self.page_size : end * self.page_size : self.page_size], self.page_size)

    @abstractmethod
    def reset(self) -> int:
        """Drop every unlocked prefix and return how many tokens that were. Invalidates every match that is not held."""

    @abstractmethod
    def check_invariants(self, holds: Iterable[KVHold]) -> None:
        """Raise ``InvariantViolation`` unless free + cached + held pages are all pages, each exactly once.

        ``holds`` are all live holds; locks and rows must be theirs alone, so ask between two plans, not within one.
        Costs O(pages + cached nodes).
        """


def require_live(hold: KVHold) -> None:
    """Raise ``StaleHold`` when the hold was given back."""
    if not hold.live:
        raise StaleHold(f"the hold on row {hold.row} was given back already")
