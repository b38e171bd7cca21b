"""Measures attention and sampling alone: ``python -m pdserve.model_runner.kernels.bench [threads]``.

Shapes are SmolLM2-135M's. Times are the least of several runs, because a machine's other work only ever adds. Attention
runs all layers of a pass over pages in random order, as they lie in a pool that has been in use.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from ...messages.worker import KVLayout
from ..forward_batch import ForwardBatch
from ..kv_pool import MHATokenToKVPool
from ..rows import ROW_PARAMS, RowParams
from .attention import PagedAttention
from .sampling import NativeSampler
from .team import Team

LAYERS, HEADS, KV_HEADS, DIM, VOCAB, PAGE_SIZE, PAGES = 30, 9, 3, 64, 49152, 16, 1200
PASSES = {
    "decode, 1 row of 100": ([99], [1]),
    "decode, 1 row of 4,000": ([3999], [1]),
    "decode, 8 rows of 512": ([511] * 8, [1] * 8),
    "decode, 32 rows of 512": ([511] * 32, [1] * 32),
    "prefill of 512": ([0], [512]),
    "prefill of 512 after 2,000": ([2000], [512]),
}
RULES: dict[str, dict[str, float]] = {
    "greedy": {"greedy": True},
    "temperature": {},
    "top-p 0.9": {"top_p": 0.9},
    "top-k 50": {"top_k": 50},
    "top-k 1,000": {"top_k": 1000},
}


def least_seconds(run: Callable[[], object], budget: float = 0.5) -> float:
    """The shortest of the runs that fit into ``budget`` seconds, at least three."""
    times: list[float] = []
    while len(times) < 3 or sum(times) < budget:
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def make_batch(starts: list[int], q_lens: list[int]) -> ForwardBatch:
    """Rows over pages in random order."""
    pages = torch.randperm(PAGES - 1, generator=torch.Generator().manual_seed(0)) + 1
    table = torch.zeros(len(starts), max(starts) + max(q_lens) + PAGE_SIZE, dtype=torch.int32)
    taken = 0
    for row, (start, q_len) in enumerate(zip(starts, q_lens, strict=True)):
        count = -(-(start + q_len) // PAGE_SIZE)
        slots = pages[taken : taken + count, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)
        table[row, : count * PAGE_SIZE] = slots.flatten().int()
        taken += count
    empty = torch.empty(0, dtype=torch.int64)
    return ForwardBatch(empty, empty, empty, torch.arange(len(starts)), starts, q_lens, table, empty)


def bench_attention(team: Team) -> None:
    """Print a line for each of ``PASSES``."""
    pool = MHATokenToKVPool(KVLayout(PAGE_SIZE, LAYERS, KV_HEADS, DIM, "bfloat16", 0), PAGES, torch.device("cpu"))
    pool.data.normal_()
    attention = PagedAttention(pool, HEADS, team)
    for name, (starts, q_lens) in PASSES.items():
        batch = make_batch(starts, q_lens)
        q = torch.randn(sum(q_lens), HEADS, DIM).bfloat16()
        out = torch.empty_like(q)
        plan = least_seconds(lambda batch=batch: attention.plan(batch), 0.05)  # type: ignore[misc]
        seconds = least_seconds(lambda q=q, out=out: attention.run(0, q, out, LAYERS))  # type: ignore[misc]
        keys = sum(start + q_len for start, q_len in zip(starts, q_lens, strict=True))
        products = sum((start + (q_len + 1) / 2) * q_len for start, q_len in zip(starts, q_lens, strict=True))
        read = keys * KV_HEADS * DIM * 2 * 2 * LAYERS / seconds / 1e9
        flops = products * HEADS * DIM * 4 * LAYERS / seconds / 1e9
        print(
            f"attention, {name}: {seconds * 1e3:.3f} ms in {LAYERS} layers ({read:.1f} GB/s of KV, {flops:.0f} GFLOP/s)"
            f" + {plan * 1e6:.0f} µs to plan"
        )


def bench_sampling(team: Team) -> None:
    """Print a line for each of ``RULES``. Logits fall off by rank as those of a language model do."""
    sampler = NativeSampler(team)
    ranked = -1.6 * torch.arange(1, VOCAB + 1).log()
    for rows in (8, 256):
        logits = (ranked + 0.3 * torch.randn(rows, VOCAB))[:, torch.randperm(VOCAB)].contiguous()
        for name, rule in RULES.items():
            params: RowParams = np.zeros(rows, dtype=ROW_PARAMS)
            params["temperature"], params["top_p"], params["seed"] = 1.0, np.inf, np.arange(rows)
            for field, value in rule.items():
                params[field] = value
            positions = np.full(rows, 7)
            seconds = least_seconds(
                lambda x=logits, p=params, at=positions: sampler.sample(x, p, at),  # type: ignore[misc]
                0.2,
            )
            print(f"sampling, {rows} rows, {name}: {seconds * 1e3:.3f} ms")


def main() -> int:
    """Measure on as many threads as the first argument says, or on all cores."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cores = sorted(os.sched_getaffinity(0))
    threads = int(sys.argv[1]) if len(sys.argv) > 1 else len(cores)
    os.sched_setaffinity(0, cores[:1])
    team = Team(threads, cores[:threads])
    print(f"{threads} threads")
    bench_attention(team)
    bench_sampling(team)
    return 0


if __name__ == "__main__":
    sys.exit(main())
