"""Products with weights that stay in FP8 (E4M3) in memory: half of bfloat16's bytes are read.

W8A8, where the device multiplies FP8 (compute capability 8.9 on): activations are quantised first (``quantise.py``).
Each token has one scale, or one for each COLUMNS elements if the weight has blocks (as in DeepSeek-V3). Sums of COLUMNS
products come from the tensor cores, are scaled, and are added up in float32 by ordinary instructions. Hopper's own sums
of FP8 keep some 14 bits, too few for long rows.

W8A16, elsewhere: registers hold weights of the activations' type, rounded as dequantised ones are. So the product
differs from that of the dequantised matrix by the order of the sum alone.

Sums go along a row from 0 on. A result does not depend on the rows beside it. It may depend on their number, which
decides the tile, and with it the tensor cores' instructions.

Shapes: T tokens, O outputs, I inputs, S scales along a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..packed.weights import COLUMNS, FP8Weight
from .quantise import quantise_blocks, quantise_tokens
from .widen import HALF_OF_E4M3, widen

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
_COLUMNS = tl.constexpr(COLUMNS)


def fp8_product(x: Tensor, weight: FP8Weight, bias: Tensor | None = None, tile: dict[str, int] | None = None) -> Tensor:
    """Return the product [T, O] of ``x`` [T, I] and the transposed weight, plus ``bias``, in the type of ``x``.

    The elements of a row of ``x`` lie side by side. ``tile`` replaces that of ``fp8_tile``.
    """
    tokens = len(x)
    out = torch.empty(tokens, weight.outputs, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    tile = tile or fp8_tile(tokens, is_wide=x.dtype == torch.float32)
    x_scales: Tensor | None = None
    if weight.eight:
        x, x_scales = _quantised(x, weight.is_blocked)
    _fp8_product[(triton.cdiv(tokens, tile["M"]), triton.cdiv(weight.outputs, tile["N"]))](
        x.view(torch.uint8) if weight.eight else x,
        x_scales,
        weight.values.view(torch.uint8),
        weight.scales,
        bias,
        out,
        x.stride(0),
        tokens,
        weight.outputs,
        weight.inputs,
        ROWS=weight.rows,
        BLOCKED=weight.is_blocked,
        EIGHT=weight.eight,
        **tile,
    )
    return out


def fp8_tile(tokens: int, *, is_wide: bool = False) -> dict[str, int]:
    """Return the kernel's tile sizes, warps and pipeline stages for ``tokens`` tokens.

    ``is_wide``: activations have four bytes. With few tokens the weight is read once, by as many programs as a matrix
    of usual size allows. With many tokens a tile is used for as many products as registers hold.
    """
    if is_wide:
        return {"M": 16, "N": 32, "K": 32, "num_warps": 4, "num_stages": 2}
    m = min(max(triton.next_power_of_2(tokens), 16), 128)
    n = 32 if m <= 32 else m
    # Few tokens wait for memory alone: more of it is asked for at a time.
    return {"M": m, "N": n, "K": COLUMNS, "num_warps": 8 if m == 128 else 4, "num_stages": 5 if m <= 32 else 3}


def _quantised(x: Tensor, is_blocked: bool) -> tuple[Tensor, Tensor]:
    """Queue rounding ``x`` to FP8, and return it with its scales [S, T]; S is 1 if each token has one scale."""
    tokens, inputs = x.shape
    out = torch.empty(tokens, inputs, dtype=torch.float8_e4m3fn, device=x.device)
    blocks = triton.cdiv(inputs, COLUMNS) if is_blocked else 1
    scales = torch.empty(blocks, tokens, dtype=torch.float32, device=x.device)
    (quantise_blocks if is_blocked else quantise_tokens)(x, out, scales.T)
    return out, scales


@triton.jit
def rounded(weight: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Round float32 to ``dtype``, ties to even.

    In the interpreter the result is still float32, as it neither multiplies bfloat16 nor rounds to it.
    """
    if not _INTERPRETED:
        result = weight.to(dtype)
    elif dtype == tl.bfloat16:
        bits = weight.to(tl.int32, bitcast=True)
        # The quiet bit keeps NaN what it is when the low bits are cut off.
        near = tl.where(weight == weight, bits + 0x7FFF + ((bits >> 16) & 1), bits | 0x400000)
        result = (near & -65536).to(tl.float32, bitcast=True)
    else:
        result = weight.to(dtype).to(tl.float32)
    return result


@triton.jit(do_not_specialize=["tokens"])
def _fp8_product(
    x_ptr: tl.tensor,
    x_scales_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_token: tl.tensor,
    tokens: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    ROWS: tl.constexpr,
    BLOCKED: tl.constexpr,
    EIGHT: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
) -> None:
    token, output = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1) * N + tl.arange(0, N)
    is_token, is_output, k = token < tokens, output < outputs, tl.arange(0, K)
    rows_ptr = x_ptr + token.to(tl.int64)[:, None] * x_token + k[None, :]
    columns_ptr = weight_ptr + output.to(tl.int64)[None, :] * inputs + k[:, None]
    own_scales_ptr, scales_row = scales_ptr + output // ROWS, (outputs + ROWS - 1) // ROWS
    total = tl.zeros([M, N], tl.float32)
    scale = tl.load(own_scales_ptr, mask=is_output, other=0.0)
    for begin in range(0, inputs, K):
        is_k = k < inputs - begin
        x = tl.load(rows_ptr + begin, mask=is_token[:, None] & is_k[None, :], other=0)
        bits = tl.load(columns_ptr + begin, mask=is_k[:, None] & is_output[None, :], other=0)
        if BLOCKED:
            scale = tl.load(own_scales_ptr + (begin // _COLUMNS) * scales_row, mask=is_output, other=0.0)
        if EIGHT:
            if _INTERPRETED:
                x, weight = widen(x, "fp8_e4m3", tl.float32), widen(bits, "fp8_e4m3", tl.float32)
                part = tl.dot(x, weight, input_precision="ieee") * (HALF_OF_E4M3 * HALF_OF_E4M3)
            else:
                part = tl.dot(x.to(tl.float8e4nv, bitcast=True), bits.to(tl.float8e4nv, bitcast=True))
            if BLOCKED:
                x_scale = tl.load(x_scales_ptr + (begin // _COLUMNS) * tokens + token, mask=is_token, other=0.0)
                part *= x_scale[:, None] * scale[None, :]
            total += part
        else:
            wide = widen(bits, "fp8_e4m3", tl.float32) * (scale * HALF_OF_E4M3)[None, :]
            weight = rounded(wide, x_ptr.dtype.element_ty)
            total = tl.dot(x.to(weight.dtype), weight, total, input_precision="ieee")
    if EIGHT and not BLOCKED:
        total *= tl.load(x_scales_ptr + token, mask=is_token, other=0.0)[:, None] * scale[None, :]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    to = out_ptr + token.to(tl.int64)[:, None] * outputs + output[None, :]
    result = rounded(total, out_ptr.dtype.element_ty).to(out_ptr.dtype.element_ty)
    tl.store(to, result, mask=is_token[:, None] & is_output[None, :])
