"""Products with packed weights against float64, and how much of the memory's rate they read at: for
``kernels_part.py`` and ``bench_part.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...model_files.packing import Packing, PackingKind
from ...model_runner.loader.open_packed import MULTIPLIES_FP8
from ...model_runner.loader.packed_sources import DummyMatrices
from ...model_runner.packed.matrices import join
from ...model_runner.packed.weights import COLUMNS, FP8Weight, PackedWeight
from .part import Part
from .record import Finding

CLOSE = {torch.bfloat16: 4e-3, torch.float16: 5e-4}
"""Of a result, as a share of the product of the magnitudes: a rounding of its type."""
NO_FP8 = "not run: this GPU does not multiply FP8"


class Kind(NamedTuple):
    """Of weights. ``eight``: with activations in FP8."""

    name: str
    packing: Packing
    eight: bool = False


KINDS = (
    Kind("FP8, a scale a matrix", Packing(PackingKind.FP8)),
    Kind("FP8 in blocks", Packing(PackingKind.FP8, (128, 128))),
    Kind("FP8 by FP8", Packing(PackingKind.FP8), eight=True),
    Kind("FP8 in blocks by FP8", Packing(PackingKind.FP8, (128, 128)), eight=True),
    Kind("four bits", Packing(PackingKind.AWQ)),
)


def checks(part: Part) -> Iterator[tuple[str, Callable[[], Finding]]]:
    """Names, and what finds out: by each tile of the products, which take seconds to compile."""
    half, other = CLOSE
    cases = ((half, 2), (half, 20)) if part.dry_run else ((half, 1), (half, 33), (half, 300), (other, 16))
    for kind in KINDS:
        for dtype, tokens in cases:
            name = f"triton, {str(dtype).removeprefix('torch.')}: {kind.name}, {tokens} tokens"
            yield name, lambda k=kind, d=dtype, t=tokens: check_product(part, k, d, t)  # type: ignore[misc]


def check_product(part: Part, kind: Kind, dtype: torch.dtype, tokens: int) -> Finding:
    """Of a random matrix whose last blocks are cut."""
    from ...model_runner.packed.product import packed_product

    if kind.eight and not multiplies_fp8(part):
        return Finding("", NO_FP8)
    outputs, inputs = (72, 160) if part.dry_run else (1000, 4128)
    weight = drawn(part, kind, outputs, inputs)
    x = torch.randn(tokens, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = packed_product(x.to(part.device), weight, None).double().cpu()
    exact, by = weight.dequantise().cpu(), x.double()
    if isinstance(weight, FP8Weight) and weight.eight:
        by = in_fp8(x, COLUMNS if weight.is_blocked else inputs)
    else:
        exact = exact.to(dtype)
    expected, size = by @ exact.double().T, by.abs() @ exact.double().abs().T
    error = ((found - expected).abs() / size).max().item()
    return Finding("", f"off by {error:.1e} at most", f"at most {CLOSE[dtype]:.0e}", error <= CLOSE[dtype])


def drawn(part: Part, kind: Kind, outputs: int, inputs: int) -> PackedWeight:
    """A random weight on the device."""
    source = DummyMatrices({"weight": (outputs, inputs)}, kind.packing, 0)
    return join([source.read("weight", part.device)], eight=kind.eight)


def in_fp8(x: Tensor, columns: int) -> Tensor:
    """``x`` as it is once it has been in FP8, with a scale for each ``columns`` of a token: float64."""
    parts = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % columns)).view(len(x), -1, columns)
    largest = parts.abs().amax(-1, keepdim=True)
    scales = torch.where(largest == 0, 1.0, largest / torch.full_like(largest, 448.0))
    return ((parts / scales).to(torch.float8_e4m3fn).double() * scales.double()).flatten(1)[:, : x.shape[1]]


def rates(part: Part, copy_rate: float) -> Iterator[tuple[str, Callable[[], Finding]]]:
    """Names, and what measures: products of 1 and of 16 tokens with a matrix of an 8B, as a share of ``copy_rate``."""
    for kind in KINDS:
        for tokens in (1,) if part.dry_run else (1, 16):
            yield f"{kind.name}, {tokens} tokens", lambda k=kind, t=tokens: measure(part, k, t, copy_rate)  # type: ignore[misc]


def measure(part: Part, kind: Kind, tokens: int, copy_rate: float) -> Finding:
    """Several matrices in turn, that the caches don't hold together."""
    from ...model_runner.packed.product import packed_product

    if kind.eight and not multiplies_fp8(part):
        return Finding("", NO_FP8)
    outputs, inputs, count = (64, 128, 2) if part.dry_run else (28_672, 4096, 8)
    weights = [drawn(part, kind, outputs, inputs) for _ in range(count)]
    x = torch.randn(tokens, inputs, device=part.device).bfloat16()
    best = float("inf")
    for _ in range(1 if part.dry_run else 8):
        begin = time.perf_counter()
        for weight in weights:
            packed_product(x, weight, None)
        if part.device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - begin) / count)
    nbytes = weights[0].nbytes + x.nbytes + tokens * outputs * x.element_size()
    return Finding("", f"{best * 1e3:.3f} ms, {nbytes / best / copy_rate:.0%} of the copy rate")


def multiplies_fp8(part: Part) -> bool:
    """Whether the device does; a CPU's interpreter does."""
    return part.device.type == "cpu" or torch.cuda.get_device_capability() >= MULTIPLIES_FP8
