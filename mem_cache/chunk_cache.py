"""The prefix cache that keeps nothing: every request computes and owns all of its KV."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ..messages.base import I32
from .allocator import TokenToKVPoolAllocator
from .base_prefix_cache import BasePrefixCache, KVHold, PrefixMatch, Rewrite, require_live
from .errors import StaleHold, UnbalancedLock
from .invariants import check_holds, check_pages, check_windows, hold_claims
from .req_to_token_pool import ReqToTokenPool
from .tree_node import NO_SLOTS, TreeNode, make_root


class ChunkCache(BasePrefixCache):
    """Every match is empty and ends in the root, the only node there is."""

    def __init__(self, allocator: TokenToKVPoolAllocator, req_to_token: ReqToTokenPool) -> None:
        super().__init__(allocator, req_to_token)
        self._root = make_root()

    def match_prefix(self, tokens: I32, extra_key: str = "") -> PrefixMatch:
        return PrefixMatch(NO_SLOTS, self._root)

    def peek(self, tokens: I32, extra_key: str = "") -> int:
        return 0

    def peek_pinned(self, tokens: I32, extra_key: str = "", but: Collection[TreeNode] = ()) -> I32:
        return NO_SLOTS

    def insert(self, tokens: I32, slots: I32, extra_key: str = "", priority: int = 0) -> int:
        return len(tokens)

    def inc_lock_ref(self, node: TreeNode) -> None:
        node.lock_ref += 1

    def dec_lock_ref(self, node: TreeNode) -> None:
        if node.lock_ref == 0:
            raise UnbalancedLock("unlocked more often than locked")
        node.lock_ref -= 1

    def evict(self, num_tokens: int) -> int:
        return 0

    def evictable_size(self) -> int:
        return 0

    def protected_size(self) -> int:
        return 0

    def hold(self, row: int, match: PrefixMatch, extra_key: str, priority: int = 0) -> KVHold:
        self.inc_lock_ref(match.node)
        return KVHold(row, extra_key, match.node, cached_len=0, kv_len=0, priority=priority)

    def cache_unfinished_req(self, hold: KVHold, tokens: I32) -> Rewrite | None:
        require_live(hold)
        if len(tokens) > hold.kv_len:
            raise StaleHold(f"{len(tokens)} tokens can't have KV in {hold.kv_len} slots")
        return None

    def prove(self, holds: Iterable[KVHold]) -> None:
        """Do nothing: no prefix is kept, so none can be marked as good."""

    def condemn(self, tokens: I32, extra_key: str = "", hold: KVHold | None = None, start: int | None = None) -> int:
        return 0

    def withdraw(self) -> None:
        """Do nothing: no cached page can lie beyond the pool's end."""

    def reset(self) -> int:
        return 0

    def check_invariants(self, holds: Iterable[KVHold]) -> None:
        holds = list(holds)
        self.allocator.check_invariants()
        check_holds(holds, self.req_to_token, {self._root: self._root.lock_ref})
        check_pages(self.allocator, hold_claims(holds, self.req_to_token, self.page_size))
        check_windows(self.allocator, holds, self.req_to_token)
