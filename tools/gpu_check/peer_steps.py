"""Torch alone beside pdserve: products, attention of prompts, and decode steps that ``torch.compile`` has made."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pdserve.model_files.spec import AttentionSpec
from pdserve.model_runner.attention.base import AttentionLimits
from pdserve.model_runner.attention.registry import BackendNeeds, make_attention_backend
from pdserve.model_runner.device.choice import open_device
from pdserve.model_runner.kv.layout import KVShape, make_layout
from pdserve.model_runner.kv.pool import make_pool

from . import kernels_part
from .bench_part import Bench
from .bench_shapes import config_of, shape_called
from .part import Part
from .rates import matmul_rate, median_seconds, read_rate
from .record import Check, Finding
from .static_llama import StaticLlama

Step = Callable[[Tensor, Tensor], Tensor]
LEAST_BYTES = 256 << 20
"""Bytes of the matrices that are multiplied with in turn: more than the caches hold."""


def product_checks(part: Part) -> Iterator[Check]:
    """Yield a name and a function that times ``F.linear``, for each matrix of a decode step of a 1B and of an 8B."""
    for name in ("1B", "8B"):
        config = config_of(shape_called(name, part.dry_run))
        hidden, inner, dim, heads, kv_heads = (
            int(str(config[key]))
            for key in ("hidden_size", "intermediate_size", "head_dim", "num_attention_heads", "num_key_value_heads")
        )
        shapes = {
            "qkv": ((heads + 2 * kv_heads) * dim, hidden),
            "out": (hidden, heads * dim),
            "gate and up": (2 * inner, hidden),
            "down": (hidden, inner),
            "head": (int(str(config["vocab_size"])), hidden),
        }
        for matrix, (outputs, inputs) in shapes.items():
            yield (
                f"F.linear: {matrix} of a {name}, {outputs} × {inputs}",
                lambda o=outputs, i=inputs: linear(part, o, i),  # type: ignore[misc]
            )


def linear(part: Part, outputs: int, inputs: int) -> Finding:
    """Time ``F.linear`` of 1, 4 and 16 tokens with a bfloat16 matrix [outputs, inputs].

    Several matrices are multiplied in turn, so that caches hold none. Report µs and the share of the read rate.
    """
    count = 2 if part.dry_run else max(2, LEAST_BYTES // (2 * outputs * inputs))
    weights = [torch.randn(outputs, inputs, device=part.device, dtype=torch.bfloat16) for _ in range(count)]
    text = []
    for tokens in (1, 4, 16):
        x = torch.randn(tokens, inputs, device=part.device, dtype=torch.bfloat16)
        seconds = median_seconds(part, [lambda w=weight: F.linear(x, w) for weight in weights])  # type: ignore[misc] # noqa: B023
        share = weights[0].nbytes / seconds / read_rate(part)
        text.append(f"{tokens}: {seconds * 1e6:.1f} µs, {share:.0%} of the read rate")
    return Finding("", "; ".join(text))


def prompt_checks(part: Part) -> Iterator[Check]:
    """Yield a name and a function for each prompt's attention, timed beside ``scaled_dot_product_attention``."""
    heads = ((4, 2, 64),) if part.dry_run else ((32, 8, 128), (32, 8, 64))
    for h, k, d in heads:
        for tokens in (48,) if part.dry_run else (512, 2048, 8192):
            name = f"attention of a prompt of {tokens}, {h}/{k} heads of {d}"
            yield name, lambda h=h, k=k, d=d, t=tokens: attention(part, t, h, k, d)  # type: ignore[misc]


def attention(part: Part, tokens: int, heads: int, kv_heads: int, dim: int) -> Finding:
    """Time a prompt's attention by pdserve's Triton kernel and by torch, and report how many times as fast ours is.

    Both compute in bfloat16. Ours also stores keys and values to their pages.
    """
    dtype = torch.float32 if part.dry_run else torch.bfloat16
    spec = AttentionSpec(heads=heads, kv_heads=kv_heads, head_dim=dim, scale=dim**-0.5)
    shape = kernels_part.Shape("prompt", heads, kv_heads, dim, ((0, tokens),))
    batch, pages = kernels_part.make_batch(shape, part.device)
    pool = make_pool(make_layout(KVShape(1, kv_heads, dim), kernels_part.PAGE, dtype), pages, part.device)
    limits = AttentionLimits(heads, (), 1, batch.req_to_token.shape[1])
    device = open_device(str(part.device))
    backend = make_attention_backend("triton", BackendNeeds([pool], dtype, limits, device, [spec], pages, 256))
    backend.plan(batch)
    q, k, v = (torch.randn(tokens, n, dim, device=part.device, dtype=dtype) for n in (heads, kv_heads, kv_heads))
    ours = median_seconds(part, [lambda: backend.forward(0, q, k, v, spec)])
    across, keys, values = (x.transpose(0, 1).unsqueeze(0).contiguous() for x in (q, k, v))
    theirs = median_seconds(
        part, [lambda: F.scaled_dot_product_attention(across, keys, values, is_causal=True, enable_gqa=True)]
    )
    operations = 2 * heads * dim * tokens**2
    text = ", ".join(
        f"{name} {seconds * 1e6:.0f} µs ({operations / seconds / matmul_rate(part):.0%} of the multiplying rate)"
        for name, seconds in (("triton", ours), ("SDPA", theirs))
    )
    return Finding("", f"{text}: {theirs / ours:.2f} times as fast")


def compiled_checks(part: Part) -> Iterator[Check]:
    """Yield a name and a function for each step of the comparison of decode steps with ``torch.compile``.

    Each is a step of one row, with a static cache in torch.
    """
    for name in ("1B", "8B"):
        times: dict[str, float] = {}
        bench = Bench(part, shape_called(name, part.dry_run), "triton")
        yield f"{name}: step of 1 by torch.compile", lambda n=name, t=times: compiled(part, n, t)  # type: ignore[misc]
        yield f"{name}: pdserve loaded", bench.load
        yield f"{name}: step of 1 beside torch.compile", lambda b=bench, t=times: compare(b, t)  # type: ignore[misc]
        yield f"{name}: pdserve unloaded", bench.unload


def compiled(part: Part, name: str, times: dict[str, float]) -> Finding:
    """Compile a whole decode step by ``torch.compile`` and time it, at the context that pdserve's steps have.

    ``name``: the shape's. The seconds of a step are put into ``times``.
    """
    shape = shape_called(name, part.dry_run)
    dtype, count = (torch.float32, 3) if part.dry_run else (torch.bfloat16, 100)
    begin = time.monotonic()
    with torch.no_grad():
        with torch.device(part.device):
            model = StaticLlama(config_of(shape), shape.context + count + 16).to(dtype)
            token, position = torch.ones(1, dtype=torch.int64), torch.full((1,), shape.context, dtype=torch.int64)
        # Inductor needs a C++ compiler on a CPU, where nothing is timed; what dynamo takes is the same.
        how: dict[str, Any] = {"backend": "eager"} if part.dry_run else {"mode": "reduce-overhead"}
        step: Step = torch.compile(model, fullgraph=True, **how)
        for _ in range(3):
            token = step(token, position).clone()
        ready = time.monotonic() - begin
        seconds = _time_steps(part, step, token, position, count)
    # What was compiled holds memory that our model needs next.
    del step, model
    torch._dynamo.reset()
    gc.collect()
    times["torch.compile"] = seconds
    return Finding("", f"{seconds * 1e3:.3f} ms a step, compiled in {ready:.0f} s")


def compare(bench: Bench, times: dict[str, float]) -> Finding:
    """Time pdserve's decode step of one row, and report how many times as fast as ``torch.compile`` it is."""
    ours = bench.steps.decode(1, 3 if bench.part.dry_run else 100).step_ms
    if "torch.compile" not in times:
        return Finding("", f"{ours:.3f} ms; torch.compile was not measured")
    ratio = times["torch.compile"] * 1e3 / ours
    text = f"{ours:.3f} ms, {ratio:.2f} times as fast"
    return Finding("", text) if bench.part.dry_run else Finding("", text, "at least as fast", ratio >= 1)


def _time_steps(part: Part, step: Step, token: Tensor, position: Tensor, count: int) -> float:
    """Return the mean seconds of a step over ``count`` steps. Each step takes the token of the previous one.

    ``position`` is advanced in place.
    """
    if not part.dry_run:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        token = step(token, position).clone()
        position.add_(1)
    if not part.dry_run:
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count
