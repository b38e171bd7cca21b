"""The interface of prefix caches: which computed prefixes are kept, and which requests use them.

A request's KV, from admission to its end::

    match_prefix ─▶ hold ─▶ (alloc_extend / alloc_decode, row written, hold.kv_len moved on
                               ─▶ cache_unfinished_req)* ─▶ cache_finished_req | release_req

Everything happens when a step is *planned*. A prefix may be in the cache, and be matched by the next request, before
the model worker has computed it. That is sound because the worker runs steps in the order of their plans.

For the same reason, a freed page is available at once: a step that still writes to it runs before its next owner. Only
uses outside that order, like a transfer that reads or writes the page, must end before the page is freed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ..messages.base import I32
from .allocator import TokenToKVPoolAllocator
from .errors import StaleHold
from .req_to_token_pool import ReqToTokenPool
from .tree_node import TreeNode
from .window_pages import WindowSpan


class PrefixMatch(NamedTuple):
    """A cached prefix: its ``slots`` [M] int32 (read-only, M a whole number of pages) and the node that it ends in.

    Unless held, valid until the next ``evict``, ``reset``, ``condemn``, ``withdraw``, ``cache_unfinished_req`` or
    ``cache_finished_req``, or until a window moves (``WindowPages.move``).
    """

    slots: I32
    node: TreeNode


class Rewrite(NamedTuple):
    """Row positions ``start …`` now live in ``slots`` [N] int32. The model worker's table must follow."""

    start: int
    slots: I32


@dataclass(slots=True, eq=False)
class KVHold:
    """The KV of one request, which hand-overs and others may use as well.

    Positions ``[0, cached_len)`` of its row are the cache's slots. The lock on ``node``, which ends at ``cached_len``
    (page-aligned), pins them. Positions ``[cached_len, kv_len)`` belong to the request alone. The scheduler writes them
    to the row, and moves ``kv_len`` on as it allocates.
    """

    row: int
    extra_key: str
    node: TreeNode
    cached_len: int
    kv_len: int
    live: bool = True
    """False once the hold was given back."""
    verified: bool = True
    """Whether its KV is known to be right. False while a peer may still write it, and forever if it is known to be bad.
    Nothing of it is shared then.
    """
    window: WindowSpan = field(default_factory=WindowSpan)
    """Pages that it uses in the window pool, if there is one (``window_pages.py``)."""
    pins: int = 1
    """Number of users, counted by ``KVMemory``."""
    left: I32 | None = None
    """Tokens of a request that has ended. ``KVMemory`` may keep their prefix when the last user is gone."""
    proven: int = 0
    """Number of first tokens with KV that has given a token here, sampled from finite logits."""
    created: int = 0
    """Time of its beginning, by the tree's clock."""
    priority: int = 0
    """Priority of the request. The eviction policy ``priority`` keeps its prefixes longer if it is higher."""
    hashed: int = 0
    """Number of first tokens with pages that were hashed (``scheduler/kv_debug.py``)."""
    page_hashes: list[bytes] = field(default_factory=list)
    """Hashes of its first pages, as far as they were needed (``page_hash.py``). The request has the same list."""


class BasePrefixCache(ABC):
    """A prefix cache over one allocator and one request table. Sizes are in tokens."""

    def __init__(self, allocator: TokenToKVPoolAllocator, req_to_token: ReqToTokenPool) -> None:
        self.allocator = allocator
        self.req_to_token = req_to_token
        self.page_size = allocator.page_size

    @abstractmethod
    def match_prefix(self, tokens: I32, extra_key: str = "") -> PrefixMatch:
        """Find the longest cached, page-aligned prefix of ``tokens`` [N] in the namespace ``extra_key``.

        If layers have windows, the prefix's last window must be cached as well. The call counts as a use of the nodes
        on its path, and may split one. It changes no size, lock or page. A caller that must compute at least one token
        asks for ``tokens[:-1]``. Nothing is pinned: ``hold`` the match before making room.
        """

    @abstractmethod
    def peek(self, tokens: I32, extra_key: str = "") -> int:
        """Return how many tokens ``match_prefix`` would find, without counting as a use or changing anything."""

    @abstractmethod
    def peek_pinned(self, tokens: I32, extra_key: str = "", but: Collection[TreeNode] = ()) -> I32:
        """Return the slots of those tokens that ``peek`` finds and that are pinned, without those in the nodes ``but``.

        A request with this prefix shares them, and what is obtainable stays the same.
        """

    @abstractmethod
    def insert(self, tokens: I32, slots: I32, extra_key: str = "", priority: int = 0) -> int:
        """Offer ``slots`` [N], which hold the KV of ``tokens`` [N], to the cache; N is a whole number of pages.

        Return K: ``slots[:K]`` stay the caller's, since the cache has that prefix in other slots, or keeps nothing.
        ``slots[K:]`` are the cache's from now on. For pages outside a ``KVHold``. Raises ``UnalignedLength``.
        """

    @abstractmethod
    def inc_lock_ref(self, node: TreeNode) -> None:
        """Pin ``node`` and its ancestors. Raises ``UnbalancedLock`` when it has left the tree."""

    @abstractmethod
    def dec_lock_ref(self, node: TreeNode) -> None:
        """Release one pin of ``node`` and its ancestors. Raises ``UnbalancedLock`` if they were not pinned."""

    @abstractmethod
    def evict(self, num_tokens: int) -> int:
        """Free at least ``num_tokens`` slots of cached prefixes that are not pinned, or all of them if they are fewer.

        Return how many tokens were evicted. Every match that is not held becomes invalid.
        """

    @abstractmethod
    def evictable_size(self) -> int:
        """Return the number of cached tokens that no request pins."""

    @abstractmethod
    def protected_size(self) -> int:
        """Return the number of cached tokens that some request pins."""

    def total_size(self) -> int:
        """Return the number of cached tokens."""
        return self.evictable_size() + self.protected_size()

    @abstractmethod
    def hold(self, row: int, match: PrefixMatch, extra_key: str, priority: int = 0) -> KVHold:
        """Pin ``match``, found in the namespace ``extra_key``, for a request, and write its slots to the request's
        ``row``.

        The returned hold is the request's memory; ``row`` (from ``ReqToTokenPool.alloc``) belongs to it from now on.
        Raises ``StaleMatch`` if the match was evicted since; nothing is changed then.
        """

    @abstractmethod
    def cache_unfinished_req(self, hold: KVHold, tokens: I32) -> Rewrite | None:
        """Share the KV of a running request. ``tokens`` are its ids as far as the steps planned so far compute them.

        Their page-aligned part enters the cache and is pinned for the request: ``hold.node`` and ``cached_len``
        advance. If the cache has got some of these pages from another request meanwhile, the request's own are freed
        and replaced in the row. The ``Rewrite`` returned says so; it is None if nothing was replaced.

        ``tokens[:cached_len]`` must be the tokens that were matched or cached before. Raises ``StaleHold``, also if
        ``tokens`` are more than ``kv_len``; nothing is changed then. A hold that is not ``verified`` shares nothing. No
        hold shares pages after a condemned or withdrawn prefix, or from the first one on beyond the pool's end.
        """

    @abstractmethod
    def prove(self, holds: Iterable[KVHold]) -> None:
        """Mark the cached prefixes of these holds as proven if all of their KV has given tokens of finite logits."""

    @abstractmethod
    def condemn(self, tokens: I32, extra_key: str = "", hold: KVHold | None = None, start: int | None = None) -> int:
        """Hide bad KV: that of ``tokens`` [N] from position ``start`` on, and all that follows it.

        No request finds it any more, and its pages are freed as soon as no request pins them. ``hold`` is that of the
        request with the bad KV. Without one, the cached part of ``tokens`` is meant.

        If ``start`` is None, it is unknown where the bad KV begins. Then the proven part is kept, because it was good
        for other requests, but it is no longer proven. If the next request that begins with it fails as well, it is
        hidden, too. A failure after a hidden part says nothing new.

        Returns the number of first tokens that are kept.
        """

    @abstractmethod
    def withdraw(self) -> None:
        """Hide pages beyond the end of a pool that has become smaller, and all that follows them.

        Pages that no request pins are freed now, the others as soon as no request pins them.
        """

    def cache_finished_req(self, hold: KVHold, tokens: I32) -> None:
        """Share the KV of a request that has ended, as ``cache_unfinished_req`` does, and free the rest of its memory.

        Free ``[aligned part of tokens, kv_len)`` and the row, and release the pin. The hold is not valid any more.
        Raises ``StaleHold``.
        """
        self.cache_unfinished_req(hold, tokens)
        self.release_req(hold)

    def release_req(self, hold: KVHold) -> None:
        """Free the memory of a request without caching more of it: it failed, was aborted or retracted.

        Free ``[cached_len, kv_len)`` and the row, and release the pin. What was cached before stays. Raises
        ``StaleHold``.
        """
        require_live(hold)
        hold.live = False
        row = self.req_to_token.table[hold.row]
        self.allocator.windows.end(hold.window, row)
        self.allocator.free(row[hold.cached_len : hold.kv_len])
        self.req_to_token.free(hold.row)
        self.dec_lock_ref(hold.node)

    @abstractmethod
    def reset(self) -> int:
        """Drop every unlocked prefix and return how many tokens that were. Invalidates every match that is not held."""

    @abstractmethod
    def check_invariants(self, holds: Iterable[KVHold]) -> None:
        """Raise ``InvariantViolation`` unless free + cached + held pages are all pages, each exactly once.

        ``holds`` are all live holds. No other locks or rows may be in use, so call it while no step is being planned.
        Costs O(pages + cached nodes).
        """


def require_live(hold: KVHold) -> None:
    """Raise ``StaleHold`` if the hold was released already."""
    if not hold.live:
        raise StaleHold(f"the hold on row {hold.row} was given back already")
