"""How kernels read elements of one byte: quantised KV, and weights in FP8.

Floats of 8 bits are taken apart and put together with integers, so that any GPU can have them. Only GPUs of capability
8.9 and later convert them by themselves.
"""

from __future__ import annotations

import triton
import triton.language as tl

HALF_OF_E4M3 = tl.constexpr(256.0)
"""Factor that ``widen`` leaves to the scale of "fp8_e4m3": a float16's exponents begin 8 higher."""


@triton.jit
def widen(x: tl.tensor, KIND: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """Return stored elements ``x`` of the type KIND as ``dtype``.

    Those of "fp8_e4m3" are too small by the factor ``HALF_OF_E4M3``, which the caller applies to their scale.
    """
    if KIND == "fp8_e4m3":
        bits = x.to(tl.uint16)
        return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(dtype)
    if KIND == "fp8_e5m2":
        return (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(dtype)
    if KIND == "int8":
        # By way of float32, as compiled, because the interpreter has no way from integers to bfloat16.
        return x.to(tl.int8, bitcast=True).to(tl.float32).to(dtype)
    return x.to(dtype)
