"""Measures the CPU kernels: ``python -P -m tools.kernels.bench [--threads 2] [--quantization gguf]``.

Prints memory-bound products in GB/s and arithmetic-bound ones in GFLOP/s (one thread). Then come whole forward passes
in milliseconds, the best of several, which is closest to an idle machine. Beside them stands their roofline: the time
that memory needs for the weights and the KV, or that arithmetic needs. Its rates are measured right before and after.

Arithmetic is that of the level: products of bfloat16 if there are any, else of float32; of bytes for quantised weights.
``PDSERVE_CPU_ISA`` chooses the kernels' level (build.py), ``--fetch-hint`` how they fetch weights (fetch.h).
"""

from __future__ import annotations

import argparse
import operator
import os
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from pdserve.model_files.spec import ExpertsSpec, MLPSpec, ModelSpec
from pdserve.model_runner.batch.forward_batch import ForwardBatch
from pdserve.model_runner.cpu_engine.build import choose_level
from pdserve.model_runner.cpu_engine.library import FetchHint, fetch_hint, set_fetch_hint
from pdserve.model_runner.cpu_engine.single_kernels import PackedWeight
from pdserve.model_runner.engines.load import load_model
from pdserve.model_runner.engines.load_setup import Threads
from pdserve.model_runner.engines.loaded import LoadedModel
from pdserve.model_runner.loader.quantized_blocks import FORMATS
from pdserve.model_runner.loader.random_blocks import random_blocks
from pdserve.server.options import ServerOptions

from .roofline import ProductKind, Roofline

N, K = 32768, 1024
CONTEXT = 200
ROW_SLOTS = 1024
BATCHES = (1, 4, 8, 16, 32, 64)
PROMPTS = (128, 512)


def main() -> None:
    """Measure the CPU kernels' products and whole forward passes, and print the figures beside their rooflines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quantization", choices=("auto", "none", "gguf", "int8", "int4"), default="none")
    parser.add_argument("--model-path", default="smollm2")
    parser.add_argument(
        "--dtype", choices=("auto", "bfloat16", "float32"), default="bfloat16", help="type of the passes"
    )
    hints = {hint.name.lower().replace("_", "-"): hint for hint in FetchHint}
    parser.add_argument("--fetch-hint", choices=hints, help="instead of the one that suits this processor")
    args = parser.parse_args()
    if args.fetch_hint:
        set_fetch_hint(hints[args.fetch_hint])
    print(f"level {choose_level().name}, fetch hint {fetch_hint().name.lower()}, {args.dtype}, {args.quantization}")
    cpus = sorted(os.sched_getaffinity(0))[: args.threads]
    os.sched_setaffinity(0, cpus[:1])
    torch.set_num_threads(args.threads)
    _products()
    options = ServerOptions(
        model_path=args.model_path,
        device="cpu",
        dtype=args.dtype,
        attention_backend="cpu",
        quantization=args.quantization,
        max_total_tokens=max(BATCHES) * ROW_SLOTS,
        chunked_prefill_size=-1,  # rows keep all of their pages
    )
    roofline = Roofline(cpus)
    kind = ProductKind.BFLOAT16 if args.dtype == "bfloat16" else ProductKind.FLOAT32
    if args.quantization != "none":
        kind = ProductKind.BYTES
    print(f"rooflines of arithmetic: products of {roofline.describe(kind)}")
    _passes(load_model(options, Threads(cpus=tuple(cpus))), roofline, kind)


def _products() -> None:
    weight = torch.randn(N, K) * 0.05
    packed = {"bfloat16": PackedWeight(weight.bfloat16(), N, K, torch.bfloat16)}
    for kind, block_format in FORMATS.items():
        # The bytes of a few rows again and again: random ones take longer to make than all else here.
        blocks = np.tile(random_blocks(kind, 256, K, np.random.default_rng(0)), (N // 256, 1))
        packed[kind.name] = PackedWeight(blocks, N, K, torch.bfloat16, block_format)
    for name, one in packed.items():
        for rows in (1, 8, 64):
            a = torch.randn(rows, K).bfloat16()
            seconds = best(partial(one.multiply, a))
            bandwidth, speed = one.nbytes / seconds / 1e9, 2 * N * K * rows / seconds / 1e9
            print(f"{name:9} {rows:3} rows: {bandwidth:6.1f} GB/s {speed:7.1f} GFLOP/s")


def _passes(model: LoadedModel, roofline: Roofline, kind: ProductKind) -> None:
    # Memory that was never written is one page of zeros, however often it is mapped, and lies in the nearest cache.
    [pool] = model.pools.blocks
    torch.from_numpy(pool.data).view(getattr(torch, pool.group.dtype)).uniform_(-1.0, 1.0)
    rows, size = max(BATCHES), model.pools.layout.page_size
    # Pages anywhere, as they are after a while.
    pages = torch.randperm(rows * ROW_SLOTS // size).view(rows, -1, 1) + 1
    table = (pages * size + torch.arange(size)).view(rows, ROW_SLOTS).int()
    for count in BATCHES:
        batch = make_batch(table, [CONTEXT] * count, [1] * count, model.vocab_size)
        _pass(f"decode, batch {count:3}", model, batch, roofline, kind)
    for length in PROMPTS:
        _pass(f"prefill of {length:4} ", model, make_batch(table, [0], [length], model.vocab_size), roofline, kind)


def _pass(name: str, model: LoadedModel, batch: ForwardBatch, roofline: Roofline, kind: ProductKind) -> None:
    before = roofline.bandwidth(), roofline.peak(kind)
    seconds = best(partial(model.engine.host_logits, batch.on_host()))
    bandwidth, peak = map(max, zip(before, (roofline.bandwidth(), roofline.peak(kind)), strict=True))
    bound = max(_bytes_read(model, batch) / bandwidth, _operations(model, batch) / peak)
    print(
        f"{name}: {seconds * 1e3:7.2f} ms, {batch.num_tokens / seconds:6.0f} tokens/s; roofline {bound * 1e3:6.2f} ms "
        f"({bandwidth / 1e9:.1f} GB/s, {peak / 1e9:.0f} GFLOP/s): {seconds / bound:.2f} times it"
    )


def _bytes_read(model: LoadedModel, batch: ForwardBatch) -> float:
    """Return the bytes that a pass reads from memory: every weight once, and the KV of every row.

    Of experts, those count that the engine's last pass read.
    """
    kv_tokens = sum(map(operator.add, batch.starts, batch.q_lens))
    weights = model.engine.step_weight_bytes
    has_experts = any(isinstance(layer.mlp, ExpertsSpec) for layer in _spec(model).layers)
    if has_experts and (counted := model.engine.weight_bytes_read()):
        weights = counted
    return float(weights + kv_tokens * model.pools.layout.page_bytes / model.pools.layout.page_size)


def _operations(model: LoadedModel, batch: ForwardBatch) -> float:
    """Count a pass's floating-point operations: linear layers, causal attention and the output head.

    The head counts for each row's last token alone.
    """
    spec = _spec(model)
    width = sum(layer.attention.heads * layer.attention.head_dim for layer in spec.layers)
    inner = sum(_inner(layer.mlp) for layer in spec.layers)
    weights = 2 * width + spec.num_layers * spec.kv_elements + 3 * inner
    layers = batch.num_tokens * weights * spec.hidden_size
    head = len(batch.q_lens) * spec.vocab_size * spec.hidden_size
    pairs = sum(count * (2 * start + count + 1) / 2 for start, count in zip(batch.starts, batch.q_lens, strict=True))
    return 2.0 * (layers + head) + 4.0 * width * pairs


def _inner(network: MLPSpec | ExpertsSpec) -> int:
    """Return the number of inner columns that a token goes through in an MLP, or in its chosen and shared experts."""
    if isinstance(network, MLPSpec):
        return network.inner
    return network.chosen * network.inner + (0 if network.shared is None else network.shared.inner)


def _spec(model: LoadedModel) -> ModelSpec:
    if model.spec is None:
        raise ValueError("the operations of a model by transformers' own class are not known")
    return model.spec


def make_batch(table: torch.Tensor, starts: list[int], q_lens: list[int], vocab_size: int) -> ForwardBatch:
    """Make a pass over the rows 0, 1, … of ``table``, with the logits of each row's last token.

    Row i computes ``q_lens[i]`` tokens after ``starts[i]`` tokens of context. ``table``: slots by row and position.
    """
    positions = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, q_lens, strict=True)])
    row_of_token = torch.repeat_interleave(torch.arange(len(starts)), torch.tensor(q_lens))
    return ForwardBatch(
        input_ids=positions * 7919 % vocab_size,
        positions=positions,
        out_cache_loc=table[row_of_token, positions].long(),
        rows=torch.arange(len(starts)),
        starts=starts,
        q_lens=q_lens,
        req_to_token=table,
        logit_indices=torch.tensor(q_lens).cumsum(0) - 1,
    )


def best(work: Callable[[], object], seconds: float = 0.5) -> float:
    """Return the seconds of the fastest run of ``work`` among as many as fit in ``seconds``, at least three."""
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds:
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


if __name__ == "__main__":
    main()
