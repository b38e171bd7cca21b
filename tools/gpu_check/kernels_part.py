"""Every kernel of the GPU path against the reference, on the device.

It checks attention of all backends, the sampler, the other operations of a layer, and copies of pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pdserve.model_files.spec import AttentionSpec
from pdserve.model_runner.attention.base import AttentionLimits
from pdserve.model_runner.attention.flashinfer.support import missing, unsupported
from pdserve.model_runner.attention.registry import BackendNeeds, make_attention_backend
from pdserve.model_runner.batch.forward_batch import ForwardBatch
from pdserve.model_runner.device.choice import open_device
from pdserve.model_runner.kv.layout import KVShape, make_layout
from pdserve.model_runner.kv.pool import make_pool

from . import op_checks, packed_checks, sampler_checks
from .part import Part, run_group
from .record import Check, Finding

TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 2e-3, torch.float16: 5e-3}
"""Largest difference to the reference in float32. Products of float32 may round to TF32."""


Lens = tuple[tuple[int, int], ...]
"""(computed before, computed now) of each row."""


class Shape(NamedTuple):
    """Shape of attention."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    lens: Lens
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


def shapes(dry_run: bool) -> list[Shape]:
    """Return the shapes of attention to check: decode steps, prompts and both, of sizes that models have."""
    decodes: Lens
    mixed: Lens
    if dry_run:
        decodes, mixed = ((0, 1), (17, 1), (40, 1)), ((5, 9), (30, 1), (0, 20))
        return [
            Shape("decode", 4, 2, 64, decodes),
            Shape("decode, window and cap", 4, 2, 64, decodes, window=7, softcap=2.0),
            Shape("mixed, sinks", 4, 2, 64, mixed, sinks=True),
        ]
    decodes = tuple((length, 1) for length in (0, 1, 15, 16, 17, 500, 1023, 4000, 9000))
    mixed = ((0, 700), (33, 1), (1000, 512), (4095, 1), (16, 129))
    return [
        *(
            Shape(f"decode, {h}/{k} heads of {d}", h, k, d, decodes)
            for h, k, d in ((32, 8, 128), (9, 3, 64), (8, 4, 256))
        ),
        *(Shape(f"mixed, {h}/{k} heads of {d}", h, k, d, mixed) for h, k, d in ((32, 8, 128), (9, 3, 64), (8, 4, 256))),
        Shape("decode, window and cap", 32, 8, 128, decodes, window=1000, softcap=30.0),
        Shape("mixed, window and cap", 32, 8, 128, mixed, window=300, softcap=30.0),
        Shape("decode, sinks", 64, 8, 64, decodes, window=128, sinks=True),
        Shape("mixed, sinks", 64, 8, 64, mixed, sinks=True),
    ]


def checks(part: Part) -> Iterator[Check]:
    """Yield a name and a function for each check of attention, by type, backend and shape; the function runs the check.

    The type that models are served in comes first.
    """
    for dtype in (torch.float32,) if part.dry_run else TOLERANCE:
        for backend in ("triton", "flashinfer"):
            for shape in shapes(part.dry_run):
                name = f"{backend}, {str(dtype).removeprefix('torch.')}: {shape.name}"
                yield name, lambda s=shape, d=dtype, b=backend: check_attention(part, s, d, b)  # type: ignore[misc]


GROUPS = {
    "layers": op_checks.checks,
    "sampler": sampler_checks.checks,
    "packed": packed_checks.checks,
    "attention": checks,
}


def check_attention(part: Part, shape: Shape, dtype: torch.dtype, backend: str) -> Finding:
    """Compare attention by ``backend`` in ``dtype`` with the torch backend in float32, on the same device.

    Report the largest absolute error.
    """
    spec = AttentionSpec(
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        scale=shape.head_dim**-0.5,
        window=shape.window,
        softcap=shape.softcap,
        sinks=shape.sinks,
    )
    if backend == "flashinfer":
        reason = missing() or unsupported([spec], dtype, dtype)
        if part.dry_run or reason:
            return Finding("", f"not run: {reason or 'it has no interpreter'}")
    torch.manual_seed(1)
    batch, pages = make_batch(shape, part.device)
    most = sum(-(-(start + count) // PAGE) for start, count in shape.lens)
    windows = () if shape.window is None else (shape.window,)
    limits = AttentionLimits(shape.heads, windows, len(shape.lens), batch.req_to_token.shape[1])

    def attend(name: str, kind: torch.dtype) -> Tensor:
        layout = make_layout(KVShape(1, shape.kv_heads, shape.head_dim), PAGE, kind)
        pool = make_pool(layout, pages, part.device)
        pool.data.copy_(kv)
        device = open_device(str(part.device))
        attention = make_attention_backend(name, BackendNeeds([pool], kind, limits, device, [spec], most, 256))
        attention.plan(batch)
        return attention.forward(0, q.to(kind), k.to(kind), v.to(kind), spec, sinks).float()

    kv = torch.randn(pages, 1, 2, PAGE, shape.kv_heads, shape.head_dim, device=part.device).to(dtype)
    q, k, v = (
        torch.randn(batch.num_tokens, heads, shape.head_dim, device=part.device).to(dtype)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    sinks = torch.randn(shape.heads, device=part.device) if shape.sinks else None
    error = (attend(backend, dtype) - attend("torch", torch.float32)).abs().max().item()
    return Finding("", f"off by {error:.1e} at most", f"at most {TOLERANCE[dtype]:.0e}", error <= TOLERANCE[dtype])


PAGE = 16


def make_batch(shape: Shape, device: torch.device) -> tuple[ForwardBatch, int]:
    """Make a batch with a row for each length of ``shape``, over scattered pages.

    Also return the number of pages that a pool needs for it, page 0 included.
    """
    columns = max(start + count for start, count in shape.lens) // PAGE * PAGE + PAGE
    per_row = columns // PAGE
    pages = len(shape.lens) * per_row + 1
    order = np.random.default_rng(0).permutation(pages - 1).reshape(len(shape.lens), per_row) + 1
    table = (order[:, :, None] * PAGE + np.arange(PAGE)).reshape(len(shape.lens), columns)
    positions = np.concatenate([np.arange(start, start + count) for start, count in shape.lens])
    rows = np.repeat(np.arange(len(shape.lens)), [count for _, count in shape.lens])

    def there(array: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Tensor:
        return torch.from_numpy(array).to(device)

    batch = ForwardBatch(
        input_ids=torch.zeros(len(rows), dtype=torch.int64, device=device),
        positions=there(positions),
        out_cache_loc=there(table[rows, positions]),
        rows=there(np.arange(len(shape.lens))),
        starts=[start for start, _ in shape.lens],
        q_lens=[count for _, count in shape.lens],
        req_to_token=there(table).to(torch.int32),
        logit_indices=torch.empty(0, dtype=torch.int64, device=device),
    )
    return batch, pages


if __name__ == "__main__":
    run_group("kernels", GROUPS)
