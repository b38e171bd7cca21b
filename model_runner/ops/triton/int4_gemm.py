"""Products with weights that stay in four bits (W4A16) in memory: AWQ, GPTQ and INT4, with scales of groups.

Numbers become weights of the activations' type in registers, rounded as dequantised ones are. So the product differs
from that of the dequantised matrix by the order of the sum alone. A program takes the bytes of ``2 * HALF`` columns at
a time: what is in their lower bits meets one half of the activations, what is in their upper bits the other.

Sums go along a row from 0 on. A result does not depend on the rows beside it. It may depend on their number, which
decides the tile, and with it the tensor cores' instructions.

Shapes: T tokens, O outputs, I inputs, G groups of columns that share a scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..packed.weights import HALF, SYMMETRIC_ZERO, Int4Weight
from .fp8_gemm import rounded

_HALF = tl.constexpr(HALF)
_ZERO = tl.constexpr(SYMMETRIC_ZERO)


def int4_product(
    x: Tensor, weight: Int4Weight, bias: Tensor | None = None, tile: dict[str, int] | None = None
) -> Tensor:
    """Return the product [T, O] of ``x`` [T, I] and the transposed weight, plus ``bias``, in the type of ``x``.

    The elements of a row of ``x`` lie side by side, in the weight's order of columns. ``tile`` replaces that of
    ``int4_tile``.
    """
    tokens = len(x)
    out = torch.empty(tokens, weight.outputs, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    tile = tile or int4_tile(tokens, weight.group, is_wide=x.dtype == torch.float32)
    _int4_product[(triton.cdiv(tokens, tile["M"]), triton.cdiv(weight.outputs, tile["N"]))](
        x,
        weight.halves,
        weight.scales,
        weight.zeros,
        bias,
        out,
        x.stride(0),
        tokens,
        weight.outputs,
        weight.inputs,
        weight.halves.shape[1],
        GROUP=weight.group,
        **tile,
    )
    return out


def int4_tile(tokens: int, group: int, *, is_wide: bool = False) -> dict[str, int]:
    """Return the kernel's tile sizes, warps and pipeline stages for ``tokens`` tokens.

    ``is_wide``: activations have four bytes. ``group``: columns that share a scale, a multiple of 32. All columns of a
    half tile are of one group.
    """
    if is_wide:
        return {"M": 16, "N": 32, "K": HALF // 2, "num_warps": 4, "num_stages": 2}
    m = min(max(triton.next_power_of_2(tokens), 16), 128)
    n = 32 if m <= 32 else m
    k = HALF if m <= 32 and group % HALF == 0 else HALF // 2
    return {"M": m, "N": n, "K": k, "num_warps": 8 if m == 128 else 4, "num_stages": 6 if m <= 32 else 3}


@triton.jit
def _weights(
    numbers: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    at: tl.tensor,
    is_there: tl.tensor,
    dtype: tl.constexpr,
) -> tl.tensor:
    """Return the four-bit ``numbers`` [K, N] as weights of ``dtype``: less their zero point, times their scale.

    ``at`` [N]: offsets of each column's scale and zero point. ``is_there`` [N]: whether the column exists.
    ``zeros_ptr``: None if all zero points are ``SYMMETRIC_ZERO``.
    """
    scale = tl.load(scales_ptr + at, mask=is_there, other=0.0).to(tl.float32)
    if zeros_ptr is None:
        found = numbers.to(tl.int32) - _ZERO
    else:
        found = numbers.to(tl.int32) - tl.load(zeros_ptr + at, mask=is_there, other=0).to(tl.int32)[None, :]
    return rounded(found.to(tl.float32) * scale[None, :], dtype)


@triton.jit(do_not_specialize=["tokens"])
def _int4_product(
    x_ptr: tl.tensor,
    halves_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_token: tl.tensor,
    tokens: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    row_bytes: tl.tensor,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
) -> None:
    token, output = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1) * N + tl.arange(0, N)
    is_token, is_output, k = token < tokens, output < outputs, tl.arange(0, K)
    rows_ptr = x_ptr + token.to(tl.int64)[:, None] * x_token + k[None, :]
    columns_ptr = halves_ptr + output.to(tl.int64)[None, :] * row_bytes + k[:, None]
    total = tl.zeros([M, N], tl.float32)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    for at in range(0, row_bytes, K):
        halves = tl.load(columns_ptr + at, mask=is_output[None, :], other=0)
        begin = at + (at // _HALF) * _HALF
        scales_at = (begin // GROUP) * outputs + output
        is_there = is_output & (output * 0 + begin < inputs)
        low = _weights(halves & 0xF, scales_ptr, zeros_ptr, scales_at, is_there, dtype)
        x = tl.load(rows_ptr + begin, mask=is_token[:, None] & (k < inputs - begin)[None, :], other=0.0)
        total = tl.dot(x.to(low.dtype), low, total, input_precision="ieee")
        begin += _HALF
        scales_at = (begin // GROUP) * outputs + output
        is_there = is_output & (output * 0 + begin < inputs)
        high = _weights(halves >> 4, scales_ptr, zeros_ptr, scales_at, is_there, dtype)
        x = tl.load(rows_ptr + begin, mask=is_token[:, None] & (k < inputs - begin)[None, :], other=0.0)
        total = tl.dot(x.to(high.dtype), high, total, input_precision="ieee")
    if bias_ptr is not None:
        total += tl.load(bias_ptr + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    to = out_ptr + token.to(tl.int64)[:, None] * outputs + output[None, :]
    result = rounded(total, out_ptr.dtype.element_ty).to(out_ptr.dtype.element_ty)
    tl.store(to, result, mask=is_token[:, None] & is_output[None, :])
