"""Activations in FP8 (E4M3) for products of eight bits (W8A8): elements and their scales.

Checkpoints want one scale for the whole tensor (given, or found in it), for each token, or for each BLOCK elements of a
token (DeepSeek-V3's). A scale is the largest magnitude over 448, or 1 if all is zero. Elements are divided by it in
float32, kept within the type, and rounded to the nearest, ties to even. NaN stays NaN.

The bits are put together without an instruction for it. Devices before compute capability 8.9 have none, and Triton's
interpreter rounds numbers next to a power of two to half of it.

Shapes: T tokens, N elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = tl.constexpr(448.0)
BLOCK = 128
_PART = 4096


def quantise_tensor(x: Tensor, scale: Tensor, out: Tensor) -> None:
    """Queue the division of ``x`` [T, N] (contiguous) by ``scale``, rounded to FP8, into ``out`` [T, N].

    ``scale``: [1] float32, measured by the checkpoint.
    """
    size = x.numel()
    if size:
        _by_one_scale[(triton.cdiv(size, _PART),)](x, scale, out.view(torch.uint8), size, BLOCK=_PART, num_warps=8)


def find_scale(x: Tensor, scale: Tensor) -> None:
    """Queue the computation of one scale for all of ``x`` (contiguous), into ``scale`` ([1] float32); three launches.

    A maximum has no order, so the scale is the same each time; it depends on the batch, as this way of scaling does.
    """
    scale.zero_()
    size = x.numel()
    if size:
        _find_largest[(triton.cdiv(size, _PART),)](x, scale, size, BLOCK=_PART, num_warps=8)
    _finish_scale[(1,)](scale, num_warps=1)


def quantise_tokens(x: Tensor, out: Tensor, scales: Tensor) -> None:
    """Queue the rounding of ``x`` [T, N] to FP8, with a scale for each token.

    It is written to ``out`` [T, N] and ``scales`` [T, 1] float32. The elements of a row lie side by side.
    """
    tokens, width = x.shape
    if tokens:
        strides = (x.stride(0), out.stride(0), scales.stride(0))
        _by_token[(tokens,)](x, out.view(torch.uint8), scales, *strides, width, BLOCK=_PART, num_warps=8)


def quantise_blocks(x: Tensor, out: Tensor, scales: Tensor) -> None:
    """Queue the rounding of ``x`` [T, N] to FP8, with a scale for each BLOCK elements of a token.

    It is written to ``out`` [T, N] and ``scales``. The last block may have fewer elements. ``scales``: [T, N / BLOCK]
    float32, in any strides. Products want contiguous columns.
    """
    tokens, width = x.shape
    if tokens:
        strides = (x.stride(0), out.stride(0), scales.stride(0), scales.stride(1))
        grid = (tokens, triton.cdiv(width, BLOCK))
        _by_blocks[grid](x, out.view(torch.uint8), scales, *strides, width, BLOCK=BLOCK, num_warps=1)


@triton.jit
def _scale_of(largest: tl.tensor) -> tl.tensor:
    return tl.where(largest == 0.0, 1.0, tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32)))


@triton.jit
def _magnitude(x: tl.tensor) -> tl.tensor:
    """Return the largest magnitude among the elements of ``x`` [N], or NaN if an element is NaN."""
    has_nan = tl.max((x != x).to(tl.int32), 0) != 0
    return tl.where(has_nan, float("nan"), tl.max(tl.where(x == x, tl.abs(x), 0.0), 0))


@triton.jit
def _divided(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Return ``x`` / ``scale``, rounded to FP8 E4M3 and cut at its largest number, as bits in uint8.

    Bits: a sign, four of exponent, three of mantissa. The exponent goes from 2^-6 on; smaller numbers are in units of
    2^-9. NaN stays NaN.
    """
    x = tl.div_rn(x, tl.zeros_like(x) + scale)
    size = tl.minimum(tl.abs(x), LARGEST)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Adding a number with a last bit of 1 rounds the fraction off.
    small = (size * 512.0 + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    code = tl.where(x == x, tl.where(size < 0.015625, small, normal), 0x7F)
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit(do_not_specialize=["size"])
def _by_one_scale(
    x_ptr: tl.tensor, scale_ptr: tl.tensor, out_ptr: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, _divided(x, tl.load(scale_ptr)), mask=at < size)


@triton.jit(do_not_specialize=["size"])
def _find_largest(x_ptr: tl.tensor, largest_ptr: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    # Magnitudes order as their bits do, NaN behind infinity.
    bits = _magnitude(x).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(largest_ptr.to(tl.pointer_type(tl.int32), bitcast=True), bits, sem="relaxed")


@triton.jit
def _finish_scale(scale_ptr: tl.tensor) -> None:
    tl.store(scale_ptr, _scale_of(tl.load(scale_ptr)))


@triton.jit
def _by_token(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    x_token: tl.tensor,
    out_token: tl.tensor,
    scales_token: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, width, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + token * x_token + at, mask=at < width, other=0.0).to(tl.float32)
        # A NaN stays in its place.
        largest = tl.where((x != x) | (tl.abs(x) > largest), tl.abs(x), largest)
    scale = _scale_of(_magnitude(largest))
    tl.store(scales_ptr + token * scales_token, scale)
    for begin in range(0, width, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + token * x_token + at, mask=at < width, other=0.0).to(tl.float32)
        tl.store(out_ptr + token * out_token + at, _divided(x, scale), mask=at < width)


@triton.jit(do_not_specialize=["scales_block"])
def _by_blocks(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    x_token: tl.tensor,
    out_token: tl.tensor,
    scales_token: tl.tensor,
    scales_block: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    is_in = at < width
    x = tl.load(x_ptr + token * x_token + at, mask=is_in, other=0.0).to(tl.float32)
    scale = _scale_of(_magnitude(x))
    tl.store(scales_ptr + token * scales_token + block * scales_block, scale)
    tl.store(out_ptr + token * out_token + at, _divided(x, scale), mask=is_in)
