"""Products with packed weights against float64, and how much of the memory's rate they read at: for
``kernels_part.py`` and ``bench_part.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pdserve.model_files.packing import Packing, PackingKind
from pdserve.model_runner.loader.open_packed import MULTIPLIES_FP8
from pdserve.model_runner.loader.packed_sources import DummyMatrices
from pdserve.model_runner.ops.packed.matrices import join
from pdserve.model_runner.ops.packed.weights import COLUMNS, FP8Weight, PackedWeight

from .part import Part
from .rates import median_seconds, read_rate
from .record import Check, Finding

CLOSE = {torch.bfloat16: 4e-3, torch.float16: 5e-4}
"""Tolerance of a result, as a share of the product of the magnitudes: a rounding of its type."""
NO_FP8 = "not run: this GPU does not multiply FP8"


class Kind(NamedTuple):
    """Kind of weights. ``eight``: with activations in FP8."""

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


def checks(part: Part) -> Iterator[Check]:
    """Yield a name and a function for each check of a product with packed weights.

    There is one for each kind and each tile size, because tiles take seconds to compile.
    """
    half, other = CLOSE
    cases = ((half, 2), (half, 20)) if part.dry_run else ((half, 1), (half, 33), (half, 300), (other, 16))
    for kind in KINDS:
        for dtype, tokens in cases:
            name = f"triton, {str(dtype).removeprefix('torch.')}: {kind.name}, {tokens} tokens"
            yield name, lambda k=kind, d=dtype, t=tokens: check_product(part, k, d, t)  # type: ignore[misc]


def check_product(part: Part, kind: Kind, dtype: torch.dtype, tokens: int) -> Finding:
    """Compare the product of ``tokens`` random rows and a random packed matrix with float64.

    The matrix's sizes are no multiples of a block, so its last blocks are cut.
    """
    from pdserve.model_runner.ops.packed.product import packed_product

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
    """Make a random packed matrix [outputs, inputs] on the part's device."""
    source = DummyMatrices({"weight": (outputs, inputs)}, kind.packing, 0)
    return join([source.read("weight", part.device)], eight=kind.eight)


def in_fp8(x: Tensor, columns: int) -> Tensor:
    """Return ``x`` rounded to FP8, as float64, with one scale for each ``columns`` elements of a token."""
    parts = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % columns)).view(len(x), -1, columns)
    largest = parts.abs().amax(-1, keepdim=True)
    scales = torch.where(largest == 0, 1.0, largest / torch.full_like(largest, 448.0))
    return ((parts / scales).to(torch.float8_e4m3fn).double() * scales.double()).flatten(1)[:, : x.shape[1]]


def rates(part: Part) -> Iterator[Check]:
    """Yield a name and a function for each measurement of a product with an 8B's packed matrix, beside torch's own."""
    for kind in KINDS:
        for tokens in (1,) if part.dry_run else (1, 16, 2048):
            yield f"product of {kind.name}, {tokens} tokens", lambda k=kind, t=tokens: measure(part, k, t)  # type: ignore[misc]


def measure(part: Part, kind: Kind, tokens: int) -> Finding:
    """Time the product of ``tokens`` rows with a packed matrix, and ``F.linear`` in bfloat16 of the same size.

    Several matrices are multiplied in turn, more than the caches hold. Report µs and the share of the read rate.
    """
    from pdserve.model_runner.ops.packed.product import packed_product

    if kind.eight and not multiplies_fp8(part):
        return Finding("", NO_FP8)
    outputs, inputs, count = (64, 128, 2) if part.dry_run else (28_672, 4096, 4)
    weights = [drawn(part, kind, outputs, inputs) for _ in range(count)]
    x = torch.randn(tokens, inputs, device=part.device).bfloat16()
    seconds = median_seconds(part, [lambda w=weight: packed_product(x, w, None) for weight in weights])  # type: ignore[misc]
    nbytes = weights[0].nbytes + x.nbytes + tokens * outputs * x.element_size()
    floats = [torch.randn(outputs, inputs, device=part.device, dtype=torch.bfloat16) for _ in range(count)]
    plain = median_seconds(part, [lambda w=weight: torch.nn.functional.linear(x, w) for weight in floats])  # type: ignore[misc]
    text = f"{seconds * 1e6:.1f} µs, {nbytes / seconds / read_rate(part):.0%} of the read rate; "
    text += f"F.linear of bfloat16 {plain * 1e6:.1f} µs"
    if kind.eight:
        text += f"; {_scaled(part, x, floats)}"
    return Finding("", text)


def _scaled(part: Part, x: Tensor, floats: list[Tensor]) -> str:
    """Time torch's own product in FP8, with a scale for each token and row. Return the result in words.

    ``floats``: matrices, which are cast to FP8. ``x``: only its shape counts.
    """
    tokens = max(len(x), 16)  # its least
    eight = torch.randn(tokens, x.shape[1], device=part.device).to(torch.float8_e4m3fn)
    one, other = (torch.ones(shape, device=part.device) for shape in ((tokens, 1), (1, len(floats[0]))))
    weights = [weight.to(torch.float8_e4m3fn) for weight in floats]

    def product(weight: Tensor) -> Tensor:
        return torch._scaled_mm(eight, weight.T, one, other, out_dtype=torch.bfloat16)

    try:
        seconds = median_seconds(part, [lambda w=weight: product(w) for weight in weights])  # type: ignore[misc]
    except RuntimeError as e:
        return f"torch._scaled_mm: not here ({str(e).splitlines()[0][:80]})"
    return f"torch._scaled_mm of {tokens} tokens {seconds * 1e6:.1f} µs"


def multiplies_fp8(part: Part) -> bool:
    """Return whether the part's device can multiply FP8. A CPU can: Triton's interpreter stands in."""
    return part.device.type == "cpu" or torch.cuda.get_device_capability() >= MULTIPLIES_FP8
