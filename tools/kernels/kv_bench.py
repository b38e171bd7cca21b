"""Measures decode steps over pools of each ``--kv-cache-dtype``: ``python -P -m tools.kernels.kv_bench``.

One model a type, all in memory together. Passes of all of them alternate, so that disturbances of the machine affect
all. A ratio is the median of those of the rounds. Prints what a token takes, how many fit into a GiB, and for each
batch milliseconds (the best) and the ratio to the first type's. ``PDSERVE_CPU_ISA`` chooses the kernels' level.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import NamedTuple

import torch

from pdserve.model_runner.batch.forward_batch import ForwardBatch
from pdserve.model_runner.cpu_engine.build import choose_level
from pdserve.model_runner.device.choice import KVDTypeName
from pdserve.model_runner.engines.load import load_model
from pdserve.model_runner.engines.load_setup import Threads
from pdserve.model_runner.engines.loaded import LoadedModel
from pdserve.model_runner.kv.block_pool import BlockPool
from pdserve.model_runner.kv.pool import KVPool
from pdserve.server.options import ServerOptions

from .bench import make_batch

DTYPES: tuple[KVDTypeName, ...] = ("bfloat16", "fp8_e4m3", "fp8_e5m2", "int8")
GIB = 2**30


class Decodes(NamedTuple):
    """``rows`` streams that have ``context`` tokens each."""

    rows: int
    context: int


CASES = (Decodes(1, 200), Decodes(8, 200), Decodes(1, 4096), Decodes(8, 1024), Decodes(8, 4096))


def main() -> None:
    """Measure decode steps over KV pools of each type, in turns, and print bytes per token, times and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quantization", choices=("none", "gguf", "int8", "int4"), default="none")
    parser.add_argument("--model-path", default="smollm2")
    parser.add_argument("--turns", type=int, default=15)
    args = parser.parse_args()
    cpus = tuple(sorted(os.sched_getaffinity(0))[: args.threads])
    os.sched_setaffinity(0, cpus[:1])
    torch.set_num_threads(args.threads)
    print(f"level {choose_level().name}, {args.threads} threads, {args.model_path}, bfloat16, {args.quantization}")
    slots = max(case.rows * (case.context + ServerOptions().page_size) for case in CASES)
    models: dict[str, LoadedModel] = {}
    for dtype in DTYPES:
        options = ServerOptions(
            model_path=args.model_path,
            device="cpu",
            dtype="bfloat16",
            kv_cache_dtype=dtype,
            attention_backend="cpu",
            quantization=args.quantization,
            max_total_tokens=slots,
        )
        model = models[dtype] = load_model(options, Threads(cpus=cpus))
        fill(model.pools.pool)
        token_bytes = model.pools.layout.page_bytes // model.pools.layout.page_size
        print(f"{dtype:9}: {token_bytes:6} bytes a token, {GIB // token_bytes} tokens in a GiB")
    for case in CASES:
        measure(case, models, args.turns)


def fill(pool: BlockPool | KVPool) -> None:
    """Write values into every page of a KV pool, so that its memory is really there.

    Memory that was never written is one shared page of zeros, which stays in the nearest cache.
    """
    if not isinstance(pool, BlockPool):
        pool.data.uniform_(-1.0, 1.0)
        return
    data, size = torch.from_numpy(pool.data), pool.layout.page_size
    if pool.group.scale_dtype is None:
        data.view(getattr(torch, pool.group.dtype)).uniform_(-1.0, 1.0)
        return
    # Elements of any bits, none of them a NaN, and scales of 0: the same work.
    heads = data.view(len(data), -1, size * pool.head_bytes)
    heads.fill_(0)
    heads[..., : size * pool.group.head_dim].random_(0, 96)


def measure(case: Decodes, models: dict[str, LoadedModel], turns: int) -> None:
    """Time a decode step of ``case`` on each of ``models``, in ``turns`` rounds. Print the fastest times and ratios.

    A ratio is the median over the rounds of the time to the first model's.
    """
    first = next(iter(models))
    seconds: dict[str, list[float]] = {name: [] for name in models}
    batch = _batch(case, models[first])
    for turn in range(turns + 1):
        for name, model in models.items():
            begin = time.perf_counter()
            model.engine.host_logits(batch.on_host())
            if turn > 0:
                seconds[name].append(time.perf_counter() - begin)
    texts = []
    for name, times in seconds.items():
        ratio = statistics.median(ours / theirs for ours, theirs in zip(times, seconds[first], strict=True))
        texts.append(f"{name} {min(times) * 1e3:.2f} ms ({ratio:.2f})")
    print(f"{case.rows} streams of {case.context} tokens: {', '.join(texts)}")


def _batch(case: Decodes, model: LoadedModel) -> ForwardBatch:
    """Make a decode pass with randomly placed pages, as they are after a while of serving."""
    size = model.pools.layout.page_size
    pages = -(-(case.context + 1) // size)
    places = (torch.randperm(case.rows * pages) + 1).view(case.rows, pages, 1)
    table = (places * size + torch.arange(size)).view(case.rows, -1).int()
    return make_batch(table, [case.context] * case.rows, [1] * case.rows, model.vocab_size)


if __name__ == "__main__":
    main()
