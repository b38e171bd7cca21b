"""Prefix caches over small pools, and what a scheduler does around them."""

from dataclasses import dataclass

import numpy as np

from pdserve.mem_cache.allocator import PagedTokenToKVPoolAllocator
from pdserve.mem_cache.base_prefix_cache import BasePrefixCache
from pdserve.mem_cache.factory import make_prefix_cache
from pdserve.mem_cache.req_to_token_pool import ReqToTokenPool
from pdserve.server.options import ServerOptions

PAGE = 4


def ids(text):
    """Return one token for each letter."""
    return np.array([ord(c) for c in text], dtype=np.int32)


@dataclass
class Setup:
    """A cache, with what a scheduler does around it."""

    allocator: PagedTokenToKVPoolAllocator
    table: ReqToTokenPool
    cache: BasePrefixCache

    def put(self, text, extra_key=""):
        """Cache ``text`` without a request; returns its newly cached slots."""
        slots = self.allocator.alloc_extend(0, len(text), 0)
        known = self.cache.insert(ids(text), slots, extra_key)
        self.allocator.free(slots[:known])
        return slots[known:].tolist()

    def start(self, text, extra_key=""):
        """Admit a request and give all of its prompt slots."""
        hold = self.cache.hold(self.table.alloc(), self.cache.match_prefix(ids(text), extra_key), extra_key)
        self.grow(hold, len(text))
        return hold

    def grow(self, hold, seq_len):
        row = self.table.table[hold.row]
        row[hold.kv_len : seq_len] = self.allocator.alloc_extend(hold.kv_len, seq_len, int(row[hold.kv_len - 1]))
        hold.kv_len = seq_len

    def row(self, hold):
        return self.table.table[hold.row, : hold.kv_len].tolist()

    def match(self, text, extra_key=""):
        return self.cache.match_prefix(ids(text), extra_key).slots.tolist()

    def used(self):
        return self.allocator.size - self.allocator.available_size()


def make_setup(num_pages=8, max_reqs=4, context_len=64, **options) -> Setup:
    allocator = PagedTokenToKVPoolAllocator(num_pages * PAGE, PAGE)
    table = ReqToTokenPool(max_reqs, context_len)
    return Setup(allocator, table, make_prefix_cache(ServerOptions(**options), allocator, table))


def tree(s):
    """Return all nodes but the root."""
    *_, root = s.cache.match_prefix(ids("")).node.path_up()
    return [n for n in root.subtree() if n is not root]
