"""How kernels read and write the elements of a KV pool; the bytes are those of ``kv/quantization.py``.

Kinds: "" (floats, as they are), "int8", "fp8_e4m3" and "fp8_e5m2", with heads that end in a float32 scale. ``widen``
(``ops/triton/widen.py``) turns elements into the queries' type, which holds each of them exactly. The scales are
applied where a product with them is cheapest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...ops.triton.widen import HALF_OF_E4M3

KINDS = {torch.int8: "int8", torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}
"""Kinds by the type of a quantised pool's elements."""

_SMALLEST_NORMAL = tl.constexpr(2.0**-126)
_ROUNDS_INTEGERS = tl.constexpr(12582912.0)
"""1.5 * 2**23: added to a float32, it leaves the nearest integer in the low bits, ties to even."""


@triton.jit
def load_scales(
    scales: tl.tensor, offsets: tl.tensor, mask: tl.tensor, KIND: tl.constexpr, HEAD_DIM: tl.constexpr
) -> tl.tensor:
    """Load the float32 scales of heads that begin at byte ``offsets`` of the pool; 0 where masked.

    A head's scale lies behind its ``HEAD_DIM`` bytes of elements. ``scales``: pointer to the pool as float32. FP8 E4M3
    scales are multiplied by the factor that ``widen`` leaves out.
    """
    found = tl.load(scales + ((offsets + HEAD_DIM) >> 2), mask=mask, other=0.0)
    return found * HALF_OF_E4M3 if KIND == "fp8_e4m3" else found


@triton.jit
def quantize_rows(x: tl.tensor, KIND: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Quantise the heads ``x`` ([N, D] float32) to bytes [N, D] and scales [N], as ``quantization.quantize`` does."""
    magnitude = tl.abs(x)
    largest = tl.max(magnitude, 1)
    # A maximum may leave a NaN out.
    is_finite = tl.min((magnitude < float("inf")).to(tl.int32), 1) > 0
    LARGEST: tl.constexpr = 127.0 if KIND == "int8" else (448.0 if KIND == "fp8_e4m3" else 57344.0)
    scales = tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32))
    scales = tl.where(scales < _SMALLEST_NORMAL, 0.0, scales)
    is_usable = is_finite & (scales > 0.0)
    divisors = tl.where(is_usable, scales, 1.0)
    quotients = tl.where(is_usable[:, None], tl.div_rn(x, tl.broadcast_to(divisors[:, None], x.shape)), 0.0)
    scales = tl.where(is_finite, scales, float("nan"))
    if KIND == "int8":
        rounded = (quotients + _ROUNDS_INTEGERS).to(tl.int32, bitcast=True) & 0xFF
        return rounded.to(tl.uint8), scales
    if KIND == "fp8_e4m3":
        return _float_bits(quotients, 3, 7), scales
    return _float_bits(quotients, 2, 15), scales


@triton.jit
def _float_bits(x: tl.tensor, MANTISSA: tl.constexpr, BIAS: tl.constexpr) -> tl.tensor:
    """Round ``x`` (float32, within the range) to floats of 8 bits, to nearest, ties to even, and return their bits."""
    SHIFT: tl.constexpr = 23 - MANTISSA
    # Below the smallest normal number steps are equal: an addition rounds to them.
    STEPS: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
    magnitude = tl.abs(x)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = (bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)) >> SHIFT
    normal -= (127 - BIAS) << MANTISSA
    subnormal = (magnitude + STEPS).to(tl.int32, bitcast=True) - tl.full(x.shape, STEPS, tl.float32).to(
        tl.int32, bitcast=True
    )
    is_normal = bits >= (128 - BIAS) << 23
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (tl.where(is_normal, normal, subnormal) | sign).to(tl.uint8)
