"""Cases of products with packed weights and of experts, and of norms.

Shapes: T tokens, I inputs, O outputs, E experts, C experts of a token, P = T C pairs, N hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...model_files.spec import Activation, NormSpec
from ...model_runner.ops.packed.weights import COLUMNS, HALF, FP8Weight, Int4Weight
from ...model_runner.ops.triton.fp8_gemm import fp8_product, fp8_tile
from ...model_runner.ops.triton.grouped_gemm import (
    BLOCK_M,
    ExpertWeights,
    experts_down,
    experts_tile,
    experts_up,
    make_blocks,
    sort_pairs,
)
from ...model_runner.ops.triton.int4_gemm import int4_product, int4_tile
from ...model_runner.ops.triton.norms import rms_norm
from ..errors import BenchOptionsError
from .case import Ask, Case, Mode, Place, replaced

ROUNDING = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-5}
"""Maximum difference of a result, as a share of the product of the magnitudes: a rounding of its type."""
ROUNDING_OF_FP8 = 3e-2


def int4(ask: Ask, place: Place) -> Case:
    """Prepare a product of random data with weights of four bits (AWQ, GPTQ, INT4), and a reference result.

    ``ask``: shape, variant and tile sizes. ``place``: where the kernel runs.
    """
    tokens, inputs, outputs, group = (ask.sizes[name] for name in ("tokens", "inputs", "outputs", "group"))
    is_wide = ask.dtype == torch.float32
    tile = replaced(int4_tile(tokens, group, is_wide=is_wide), ask.tile)
    if HALF % tile["K"] or group % tile["K"]:
        raise BenchOptionsError(f"--tile K={tile['K']}: it must divide {HALF} and the group of {group}")
    width = -(-inputs // (2 * HALF)) * HALF
    shape = (inputs // group, outputs)
    zeros = None
    if ask.variant == "zeros":
        zeros = place.randint(16, *shape)
    scales = place.randn(*shape, dtype=torch.float16, scale=0.01)
    weight = Int4Weight(place.randint(256, outputs, width), scales, zeros, inputs, group)
    x = place.randn(tokens, inputs, dtype=ask.dtype)
    exact = lambda: weight.dequantise().to(ask.dtype).float()  # noqa: E731
    return _product(ask, x, weight.nbytes, outputs, lambda: int4_product(x, weight, tile=tile), exact, tile)


def fp8(ask: Ask, place: Place) -> Case:
    """Prepare a product of random data with weights in FP8, W8A16 or W8A8, and a reference result.

    ``ask``: shape, variant and tile sizes. ``place``: where the kernel runs.
    """
    tokens, inputs, outputs = (ask.sizes[name] for name in ("tokens", "inputs", "outputs"))
    is_blocked, eight = ask.variant.startswith("blocks"), ask.variant.endswith("w8a8")
    if eight and place.mode is not Mode.INTERPRETED and place.capability < 89:
        raise BenchOptionsError(f"--variant {ask.variant}: GPUs multiply FP8 from capability 8.9 on")
    tile = replaced(fp8_tile(tokens, is_wide=ask.dtype == torch.float32), ask.tile)
    if is_blocked and COLUMNS % tile["K"]:
        raise BenchOptionsError(f"--tile K={tile['K']}: it must divide the blocks of {COLUMNS} columns")
    rows = COLUMNS if is_blocked else 1
    scales = place.randn(-(-inputs // COLUMNS) if is_blocked else 1, -(-outputs // rows))
    # Far within the range of FP8, which ends at 448.
    values = place.randn(outputs, inputs, dtype=torch.float8_e4m3fn, scale=16.0)
    weight = FP8Weight(values, scales, rows, is_blocked, eight)
    x = place.randn(tokens, inputs, dtype=ask.dtype)
    exact = lambda: weight.dequantise() if eight else weight.dequantise().to(ask.dtype).float()  # noqa: E731
    case = _product(ask, x, weight.nbytes, outputs, lambda: fp8_product(x, weight, tile=tile), exact, tile)
    return case._replace(tolerance=ROUNDING_OF_FP8) if eight else case


def experts(ask: Ask, place: Place, *, is_up: bool) -> Case:
    """Prepare one of the two products of a layer's experts on random data, and a reference result.

    ``ask``: shape and tile sizes. ``place``: where the kernel runs. ``is_up``: the product of gate and up; False: of
    down.
    """
    names = ("tokens", "experts", "chosen", "inner", "hidden")
    tokens, count, chosen_count, inner, hidden = (ask.sizes[name] for name in names)
    block_m = ask.tile.get("M", BLOCK_M)
    tile = replaced(experts_tile(block_m, ask.dtype, 2 if is_up else 1), ask.tile)
    weights = ExpertWeights(
        place.randn(count, 2 * inner, hidden, dtype=ask.dtype, scale=hidden**-0.5),
        place.randn(count, hidden, inner, dtype=ask.dtype, scale=inner**-0.5),
    )
    # Each token's experts differ, and all experts have about as many tokens.
    first = torch.arange(tokens, device=place.device)[:, None] * chosen_count
    chosen = ((first + torch.arange(chosen_count, device=place.device)) % count).int()
    blocks = make_blocks(chosen.numel(), count, block_m, place.device)
    sort_pairs(chosen, blocks)
    pairs, own = chosen.numel(), chosen.flatten().tolist()
    touched = min(count, pairs)
    if is_up:
        x, out = place.randn(tokens, hidden, dtype=ask.dtype), place.randn(pairs, inner, dtype=ask.dtype)

        def run() -> Tensor:
            experts_up(x, weights, blocks, chosen_count, out, Activation.SILU, tile=tile)
            return out

        def expected() -> Tensor:
            gate, up = _by_expert(x.repeat_interleave(chosen_count, 0), weights.gate_up, own).chunk(2, 1)
            return torch.nn.functional.silu(gate) * up

        weight_bytes = touched * 2 * inner * hidden * ask.dtype.itemsize
        work = 4 * pairs * inner * hidden
    else:
        x, out = place.randn(pairs, inner, dtype=ask.dtype), place.randn(pairs, hidden)
        shares = place.randn(pairs)

        def run() -> Tensor:
            experts_down(x, weights, blocks, shares, out, tile=tile)
            return out

        def expected() -> Tensor:
            return _by_expert(x, weights.down, own) * shares[:, None]

        weight_bytes = touched * hidden * inner * ask.dtype.itemsize
        work = 2 * pairs * inner * hidden
    nbytes = weight_bytes + x.nbytes + out.nbytes
    return Case(run, expected, 4 * ROUNDING[ask.dtype], tile, nbytes, work, lambda: expected().abs().clamp_(min=1.0))


def norm(ask: Ask, place: Place) -> Case:
    """Prepare a root-mean-square norm of random tokens, and a reference result.

    ``ask``: shape. ``place``: where the kernel runs.
    """
    x = place.randn(ask.sizes["tokens"], ask.sizes["width"], dtype=ask.dtype)
    weight, spec = place.randn(ask.sizes["width"]), NormSpec(eps=1e-5)

    def expected() -> Tensor:
        wide = x.float()
        return wide * (wide.square().mean(1, keepdim=True) + spec.eps).rsqrt() * weight

    nbytes = 2 * x.nbytes + weight.nbytes
    scale = lambda: expected().abs().clamp_(min=1.0)  # noqa: E731
    return Case(lambda: rms_norm(x, weight, spec), expected, 2 * ROUNDING[ask.dtype], {}, nbytes, 4 * x.numel(), scale)


def _product(
    ask: Ask,
    x: Tensor,
    weight_bytes: int,
    outputs: int,
    run: Callable[[], Tensor],
    exact: Callable[[], Tensor],
    tile: dict[str, int],
) -> Case:
    """Describe the measurement of ``run``, which multiplies ``x`` by weights.

    ``weight_bytes``: bytes of the packed weights. ``outputs``: elements of a token's result. ``exact``: returns the
    weights in float32, for the reference.
    """
    tokens, inputs = x.shape
    nbytes = weight_bytes + x.nbytes + tokens * outputs * ask.dtype.itemsize
    return Case(
        run,
        lambda: x.float() @ exact().T,
        ROUNDING[ask.dtype],
        tile,
        nbytes,
        2 * tokens * inputs * outputs,
        lambda: x.float().abs() @ exact().abs().T,
    )


def _by_expert(x: Tensor, weights: Tensor, experts_of_rows: list[int]) -> Tensor:
    """Return each row's product with its expert's weights, in float32."""
    return torch.stack([weights[expert].float() @ row.float() for row, expert in zip(x, experts_of_rows, strict=True)])
