"""``PYTHON vllm_side.py WORKLOAD``: vLLM's prefix cache, asked the same; prints JSON of µs by what was done.

This program runs by itself, in an interpreter with vLLM and without pdserve. The figures are:

- ``match``: hashing a new prompt's blocks, and looking them up;
- ``lookup``: the lookup alone, with known hashes;
- ``store``: ``cache_blocks``;
- ``decode``: ``allocate_slots`` for each request;
- ``evict``: taking that many blocks, which are all cached.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams  # type: ignore[import-not-found]
from vllm.utils.hashing import get_hash_fn_by_name  # type: ignore[import-not-found]
from vllm.v1.core.kv_cache_manager import KVCacheManager  # type: ignore[import-not-found]
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # type: ignore[import-not-found]
from vllm.v1.kv_cache_interface import (  # type: ignore[import-not-found]
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.request import Request  # type: ignore[import-not-found]

LOOKUPS, DECODES, EVICTIONS = 50, 100, 4


def microseconds(what: Callable[[int], object], times: int) -> list[float]:
    """Call ``what`` with 0, 1, … ``times`` - 1, and return the µs that each call took."""
    took = []
    for i in range(times):
        began = time.perf_counter()
        what(i)
        took.append((time.perf_counter() - began) * 1e6)
    return took


class Theirs:
    """The measured operations on vLLM's block pool and KV cache manager, as ``ours.Ours`` does them on ours."""

    def __init__(self, load: dict[str, Any]) -> None:
        self.page = page = int(load["page_size"])
        self.stored = np.split(load["stored"], load["stored_ends"][:-1])
        self.tails = np.split(load["tails"], load["tails_ends"][:-1])
        self.deep = self.stored[: int(load["deep"])]
        self.decoding, self.evicted = int(load["decoding"]), int(load["evicted_tokens"])
        # The pool is full when the workload is stored: whatever is taken then is evicted first.
        self.blocks = int(load["kept_tokens"]) // page + sum(len(t) for t in self.tails[:8]) // page
        spec = FullAttentionSpec(block_size=page, num_kv_heads=1, head_size=64, dtype=torch.float16)
        config = KVCacheConfig(self.blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        hash_fn = get_hash_fn_by_name("sha256")
        init_none_hash(hash_fn)
        self.hasher = get_request_block_hasher(page, hash_fn)
        self.manager = KVCacheManager(config, 1 << 20, scheduler_block_size=page, hash_block_size=page)
        self.count = 0
        for tokens in self.stored:
            self.manager.free(self.run(tokens))

    def request(self, tokens: Any) -> Any:
        """Make vLLM's request for ``tokens``, with its blocks hashed as when a prompt comes to a server."""
        self.count += 1
        sampling = SamplingParams(max_tokens=4096)
        return Request(str(self.count), tokens.tolist(), sampling, None, block_hasher=self.hasher)

    def run(self, tokens: Any, *, delay: bool = False) -> Any:
        """Make a request, allocate blocks for all of its ``tokens``, and return it as if they were computed.

        ``delay``: don't cache the new blocks yet.
        """
        request = self.request(tokens)
        cached, found, _ = self.manager.get_computed_blocks(request)
        given = self.manager.allocate_slots(request, len(tokens) - found, found, cached, delay_cache_blocks=delay)
        assert given is not None
        request.num_computed_tokens = len(tokens)
        return request

    def match(self) -> list[float]:
        """Return the µs of lookups from token ids to blocks, hashing included."""
        deep = self.deep
        return microseconds(lambda i: self.manager.get_computed_blocks(self.request(deep[i % len(deep)])), LOOKUPS)

    def lookup(self) -> list[float]:
        """Return the µs of lookups from known hashes to blocks."""
        requests = [self.request(tokens) for tokens in self.deep]
        found = self.manager.get_computed_blocks(requests[0])[1]
        assert found >= len(self.deep[0]) - self.page
        return microseconds(lambda i: self.manager.get_computed_blocks(requests[i % len(requests)]), LOOKUPS)

    def store(self) -> list[float]:
        """Return the µs of caching a request's blocks after its cached prompt."""
        requests = [self.run(tail, delay=True) for tail in self.tails[1:16:2]]
        took = microseconds(lambda i: self.manager.cache_blocks(requests[i], requests[i].num_tokens), len(requests))
        for request in requests:
            self.manager.free(request)
        return took

    def decode(self) -> list[float]:
        """Return the µs of each decode step, which allocates room for a token of each of ``decoding`` requests."""
        lens = np.random.default_rng(1).integers(100, 1000, self.decoding)
        requests = [self.run(np.arange(n, dtype=np.int64) + 40_000 * (i + 1)) for i, n in enumerate(lens)]
        took = []
        for _ in range(DECODES):
            for request in requests:
                request.append_output_token_ids(7)
            began = time.perf_counter()
            for request in requests:
                assert self.manager.allocate_slots(request, 1) is not None
            took.append((time.perf_counter() - began) * 1e6)
            for request in requests:
                request.num_computed_tokens += 1
        for request in requests:
            self.manager.free(request)
        return took

    def evict(self) -> list[float]:
        """Return the µs of allocating blocks for ``evicted`` tokens, which evicts cached blocks."""
        pool = self.manager.block_pool
        return microseconds(lambda _: pool.get_new_blocks(self.evicted // self.page), EVICTIONS)


def main() -> None:
    """Measure everything on the workload file of the command line, and print the times as JSON."""
    with np.load(sys.argv[1]) as load:
        theirs = Theirs({name: load[name] for name in load.files})
    gc.collect()
    gc.freeze()
    names = ("match", "lookup", "store", "decode", "evict")
    out = {name: getattr(theirs, name)() for name in names}
    print("\n" + json.dumps(out))


if __name__ == "__main__":
    main()
