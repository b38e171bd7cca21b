"""The prefix cache that the options ask for."""

from __future__ import annotations

from collections.abc import Sequence

from .allocator import TokenToKVPoolAllocator
from .base_prefix_cache import BasePrefixCache
from .chunk_cache import ChunkCache
from .eviction_policies import EVICTION_POLICIES
from .options import CacheOptions
from .radix_cache import RadixCache, TreeWatcher
from .req_to_token_pool import ReqToTokenPool


def make_prefix_cache(
    options: CacheOptions,
    allocator: TokenToKVPoolAllocator,
    req_to_token: ReqToTokenPool,
    watchers: Sequence[TreeWatcher] = (),
) -> BasePrefixCache:
    """Make a ``ChunkCache`` with ``disable_radix_cache``, otherwise a ``RadixCache`` with ``radix_eviction_policy``.

    ``watchers``: objects that a ``RadixCache`` tells of stored and removed pages. A ``ChunkCache`` ignores them.
    """
    if options.disable_radix_cache:
        return ChunkCache(allocator, req_to_token)
    return RadixCache(allocator, req_to_token, EVICTION_POLICIES[options.radix_eviction_policy], watchers)
