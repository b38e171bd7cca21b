"""Chooses the product of Triton that a packed weight is multiplied by. Imports Triton, which is no dependency."""

from __future__ import annotations

from torch import Tensor

from ..triton.fp8_gemm import fp8_product
from ..triton.int4_gemm import int4_product
from .weights import FP8Weight, PackedWeight


def packed_product(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """Return ``x`` [T, I] times the transposed packed weight, plus ``bias``: [T, O] in the type of ``x``."""
    if not isinstance(weight, FP8Weight) and weight.order is not None:
        x = x.index_select(1, weight.order)
    if x.stride(-1) != 1:
        x = x.contiguous()
    return fp8_product(x, weight, bias) if isinstance(weight, FP8Weight) else int4_product(x, weight, bias)
