"""Keys and values of one byte an element, with a scale for each head of each token.

A head's elements are divided by ``scale`` = (its largest magnitude) / (the type's largest number), and rounded to the
nearest, ties to even. The bytes are the same on every device, and in ``cpu_engine/src/kv_quantization.h``. Scales are
float32: rounded to 16 bits they would save 2 of 68 bytes (a head of 64). 16 slots' scales just fill a cache line, so
the kernels' blocks stay on lines of their own. A head that is all zero, or next to it, has the scale 0. A head with an
infinity or a NaN has the scale NaN, and its elements are 0. Reading it gives NaN, which fails the request.

Shapes: T tokens, H heads, D head_dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..dtypes import SCALE_BYTES

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""What the largest magnitude of a head becomes, by the type of the elements."""
_SMALLEST = torch.finfo(torch.float32).smallest_normal


class Quantized(NamedTuple):
    """``elements`` [..., D] of one of the types of ``LARGEST``, and ``scales`` [...] float32."""

    elements: Tensor
    scales: Tensor


def quantize(x: Tensor, dtype: torch.dtype) -> Quantized:
    """Round the heads ``x`` [..., D] to elements of ``dtype``, with a float32 scale for each head."""
    wide = x.float()
    largest = wide.abs().amax(-1)
    # Divided by a tensor: by a number, accelerators would multiply with its inverse.
    scales = largest / torch.full_like(largest, LARGEST[dtype])
    scales = torch.where(scales < _SMALLEST, 0.0, scales)
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    is_usable = scales > 0
    quotients = wide / torch.where(is_usable, scales, 1.0)[..., None]
    quotients = torch.where(is_usable[..., None], quotients, 0.0)
    return Quantized((quotients.round() if dtype == torch.int8 else quotients).to(dtype), scales)


def dequantize(elements: Tensor, scales: Tensor) -> Tensor:
    """Return elements times scales, [..., D] float32: what ``quantize`` rounded, with its rounding errors."""
    return elements.float() * scales[..., None]


def pack_heads(x_THD: Tensor, dtype: torch.dtype) -> Tensor:
    """Quantise ``x_THD`` to the rows of a pool in the order "tokens": [T, H, D + 4] uint8.

    A head's elements come first, then its float32 scale.
    """
    elements, scales = quantize(x_THD, dtype)
    return torch.cat((elements.view(torch.uint8), scales[..., None].view(torch.uint8)), -1)


def unpack_heads(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the dequantised values of ``rows`` [..., D + 4] as [..., D] float32. ``dtype``: type of the elements."""
    elements, scales = rows[..., :-SCALE_BYTES].view(dtype), rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return dequantize(elements, scales[..., 0])
