"""``python -m pdserve.benchmark.cache.ours WORKLOAD``: our tree and allocator; prints JSON of µs by what was done."""

from __future__ import annotations

from ...runtime import clean_start  # isort: skip  # noqa: F401

import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ...mem_cache.allocator import PagedTokenToKVPoolAllocator
from ...mem_cache.radix_cache import RadixCache
from ...mem_cache.req_to_token_pool import ReqToTokenPool
from ...messages.base import I32

LOOKUPS, DECODES, EVICTIONS = 200, 400, 4


def microseconds(what: Callable[[int], object], times: int) -> list[float]:
    """Call ``what`` with 0, 1, … ``times`` - 1, and return the µs that each call took."""
    took = []
    for i in range(times):
        began = time.perf_counter()
        what(i)
        took.append((time.perf_counter() - began) * 1e6)
    return took


def _runs(load: Any, name: str) -> list[I32]:
    return np.split(load[name], load[f"{name}_ends"][:-1])


class Ours:
    """The tree of a workload. Each measurement leaves it as large as it was, but for ``evict``, the last one."""

    def __init__(self, load: Any) -> None:
        self.page = int(load["page_size"])
        self.stored, self.tails = _runs(load, "stored"), _runs(load, "tails")
        self.deep, self.nodes = self.stored[: int(load["deep"])], int(load["path_nodes"])
        self.decoding, self.evicted = int(load["decoding"]), int(load["evicted_tokens"])
        spare = 2 * sum(len(t) - len(self.deep[0]) for t in self.tails) + 64 * self.decoding * self.page
        pages = (int(load["kept_tokens"]) + spare + max(len(s) for s in self.stored)) // self.page + 1
        self.allocator = PagedTokenToKVPoolAllocator(pages * self.page, self.page)
        self.table = ReqToTokenPool(len(self.tails), len(self.tails[0]))
        self.cache = RadixCache(self.allocator, self.table)
        for tokens in self.stored:
            slots = self._slots(len(tokens))
            known = self.cache.insert(tokens, slots)
            self.allocator.free(slots[:known])

    def _slots(self, count: int) -> I32:
        slots = self.allocator.alloc_extend(0, count, 0)
        assert slots is not None
        return slots

    def match(self) -> list[float]:
        """Return the µs of lookups from token ids to slots, through all nodes of a path."""
        for tokens in self.deep:
            found = self.cache.match_prefix(tokens)
            assert (len(found.slots), len(list(found.node.path_up())) - 1) == (len(tokens), self.nodes)
        return microseconds(lambda i: self.cache.match_prefix(self.deep[i % len(self.deep)]), LOOKUPS)

    def insert(self) -> list[float]:
        """Return the µs of insertions of a prompt from its first token. The tree lacks only the prompt's end."""
        slots = []
        for tail in self.tails[::2]:
            known = self.cache.match_prefix(tail).slots
            slots.append(np.concatenate([known, self._slots(len(tail) - len(known))]))
        return microseconds(lambda i: self.cache.insert(self.tails[2 * i], slots[i]), len(slots))

    def store(self) -> list[float]:
        """Return the µs of storing the tokens that a request has computed after its cached prompt."""
        holds = []
        for tail in self.tails[1::2]:
            row = self.table.alloc()
            assert row is not None
            hold = self.cache.hold(row, self.cache.match_prefix(tail), "")
            self.table.table[row, hold.kv_len : len(tail)] = self._slots(len(tail) - hold.kv_len)
            hold.kv_len = len(tail)
            holds.append(hold)
        took = microseconds(lambda i: self.cache.cache_unfinished_req(holds[i], self.tails[2 * i + 1]), len(holds))
        for hold in holds:
            self.cache.release_req(hold)
        return took

    def decode(self) -> list[float]:
        """Return the µs of each decode step, which allocates one slot for each of ``decoding`` requests.

        About every ``page``-th slot begins a page.
        """
        lens = np.random.default_rng(1).integers(100, 4000, self.decoding).astype(np.int32)
        last = self._slots(self.decoding * self.page)[:: self.page] + (lens - 1) % self.page

        def step(_: int) -> None:
            nonlocal lens, last
            lens = lens + 1
            slots = self.allocator.alloc_decode(lens, last)
            assert slots is not None
            last = slots

        return microseconds(step, min(DECODES, 32 * self.page))

    def evict(self) -> list[float]:
        """Return the µs of evictions, each of ``evicted`` tokens. The tree is smaller afterwards."""
        return microseconds(lambda _: self.cache.evict(self.evicted), EVICTIONS)


def main() -> None:
    """Measure everything on the workload file of the command line, and print the times as JSON."""
    with np.load(Path(sys.argv[1])) as load:
        ours = Ours({name: load[name] for name in load.files})
    gc.collect()
    gc.freeze()
    names = ("match", "insert", "store", "decode", "evict")
    json.dump({name: getattr(ours, name)() for name in names}, sys.stdout)


if __name__ == "__main__":
    main()
