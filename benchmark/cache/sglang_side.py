"""``PYTHON sglang_side.py WORKLOAD``: SGLang's RadixCache and paged allocator, asked the same; prints JSON of µs.

It runs by itself, without pdserve, in an interpreter with SGLang (``pip install --no-deps sglang``) and torch.
SGLang's other imports have nothing to do with its tree. Missing ones are replaced by names that do nothing.

``match`` includes the slots, as ours does. The tree in Python is measured, because it runs without a build of its own.
The one in Rust needs the torch that it was compiled for.
"""

from __future__ import annotations

import gc
import importlib
import importlib.abc
import importlib.machinery
import json
import sys
import time
import types
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

LOOKUPS, DECODES, EVICTIONS = 100, 300, 4
MOST_MISSING = 60


class _Nothing(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _Anything(metaclass=_Nothing):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the decorated function unchanged, if used as a decorator; without arguments this object."""
        return args[0] if args else self

    def __class_getitem__(cls, item: Any) -> Any:
        return cls


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Return a spec for a module of a package in ``names``, which were found missing; None for any other."""
        if name.split(".")[0] not in self.names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        """Make a module without contents."""
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Make the module a package, so that modules in it can be imported."""
        module.__path__ = []


def load(*names: str) -> list[Any]:
    """Import the modules of SGLang and return them. Missing modules of other packages are replaced by empty ones.

    Raises ``ImportError`` if a module of SGLang or torch is missing.
    """
    stand_ins = _StandIns()
    sys.meta_path.append(stand_ins)
    for _ in range(MOST_MISSING):
        try:
            return [importlib.import_module(name) for name in names]
        except ModuleNotFoundError as e:
            missing = (e.name or "").split(".")[0]
            if missing in ("", "sglang", "torch"):
                raise
            stand_ins.names.add(missing)
            for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
                del sys.modules[name]
    raise ImportError(f"too much is missing: {sorted(stand_ins.names)}")


def microseconds(what: Callable[[int], object], times: int) -> list[float]:
    """Call ``what`` with 0, 1, … ``times`` - 1, and return the µs that each call took."""
    took = []
    for i in range(times):
        began = time.perf_counter()
        what(i)
        took.append((time.perf_counter() - began) * 1e6)
    return took


class Theirs:
    """The measured operations on SGLang's radix cache and allocator, as ``ours.Ours`` does them on ours."""

    def __init__(self, workload: dict[str, Any]) -> None:
        base = "sglang.srt.mem_cache"
        self.radix, self.params, paged, init = load(
            f"{base}.radix_cache", f"{base}.base_prefix_cache", f"{base}.allocator.paged", f"{base}.cache_init_params"
        )
        self.page = page = int(workload["page_size"])
        self.stored = np.split(workload["stored"], workload["stored_ends"][:-1])
        self.tails = np.split(workload["tails"], workload["tails_ends"][:-1])
        self.deep = self.stored[: int(workload["deep"])]
        self.decoding, self.evicted = int(workload["decoding"]), int(workload["evicted_tokens"])
        longest = max(len(tokens) for tokens in self.stored)
        spare = sum(len(t) - len(self.deep[0]) for t in self.tails) + 64 * self.decoding * page
        size = (int(workload["kept_tokens"]) + 2 * spare + longest) // page * page
        self.allocator = paged.PagedTokenToKVPoolAllocator(size, page, torch.float16, "cpu", None, need_sort=False)
        self.allocator.use_triton_kernels = False
        self.cache = self.radix.RadixCache(
            init.CacheInitParams(
                disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=self.allocator, page_size=page
            )
        )
        for tokens in self.stored:
            slots = self._slots(len(tokens))
            self.allocator.free(slots[: self._insert(self.key(tokens), slots)])

    def key(self, tokens: Any) -> Any:
        """Return the radix cache's key of token ids, as a request has it."""
        return self.radix.RadixKey(array("q", tokens.tolist()))

    def _slots(self, count: int) -> Any:
        slots = self.allocator.alloc(count)
        assert slots is not None
        return slots

    def _insert(self, key: Any, slots: Any) -> int:
        return int(self.cache.insert(self.params.InsertParams(key=key, value=slots)).prefix_len)

    def _match(self, key: Any) -> Any:
        found = self.cache.match_prefix(self.params.MatchPrefixParams(key=key))
        return self.cache.path_device_indices(found.last_device_node)

    def match(self) -> list[float]:
        """Return the µs of lookups from token ids to slots."""
        keys = [self.key(tokens) for tokens in self.deep]
        assert len(self._match(keys[0])) == len(self.deep[0])
        return microseconds(lambda i: self._match(keys[i % len(keys)]), LOOKUPS)

    def insert(self) -> list[float]:
        """Return the µs of insertions of a prompt from its first token. The tree lacks only the prompt's end."""
        keys, slots = [], []
        for tail in self.tails[::2]:
            keys.append(self.key(tail))
            known = self._match(keys[-1])
            slots.append(torch.cat([known, self._slots(len(tail) - len(known))]))
        return microseconds(lambda i: self._insert(keys[i], slots[i]), len(keys))

    def decode(self) -> list[float]:
        """Return the µs of each decode step, which allocates one slot for each of ``decoding`` requests."""
        lens = torch.from_numpy(np.random.default_rng(1).integers(100, 4000, self.decoding))
        last = self._slots(self.decoding * self.page)[:: self.page] + (lens - 1) % self.page

        def step(_: int) -> None:
            nonlocal lens, last
            lens = lens + 1
            last = self.allocator.alloc_decode(lens, lens, last)
            assert last is not None

        return microseconds(step, min(DECODES, 32 * self.page))

    def evict(self) -> list[float]:
        """Return the µs of evictions, each of ``evicted`` tokens. The tree is smaller afterwards."""
        return microseconds(lambda _: self.cache.evict(self.params.EvictParams(num_tokens=self.evicted)), EVICTIONS)


def main() -> None:
    """Measure everything on the workload file of the command line, and print the times as JSON."""
    torch.set_num_threads(1)
    with np.load(sys.argv[1]) as workload:
        theirs = Theirs({name: workload[name] for name in workload.files})
    gc.collect()
    gc.freeze()
    out = {name: getattr(theirs, name)() for name in ("match", "insert", "decode", "evict")}
    print("\n" + json.dumps(out))


if __name__ == "__main__":
    main()
