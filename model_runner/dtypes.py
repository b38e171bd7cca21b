"""Names of the types of weights, activations and KV: torch's own, without importing torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Union

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

DType = Union[str, "torch.dtype"]
"""A type by its name, or as torch has it."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""Bytes of an element, by the type's name."""
QUANTIZED = ("int8", "float8_e4m3fn", "float8_e5m2")
"""Types of KV elements that have a scale for each head of each token."""
SCALE_DTYPE, SCALE_BYTES = "float32", 4
"""Type and bytes of such a scale."""


def dtype_name(dtype: DType) -> str:
    """Return the name of a type: "bfloat16" for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def round_to(value: float, dtype: str) -> float:
    """Round ``value`` to the nearest number of ``dtype``, ties to even.

    Raises ``ValueError`` unless ``dtype`` is float32 or bfloat16.
    """
    single = np.array([value], dtype=np.float32)
    if dtype == "bfloat16":
        single = widen_bfloat16(round_to_bfloat16(single))
    elif dtype != "float32":
        raise ValueError(f"numbers are rounded to float32 or bfloat16, not to {dtype}")
    return float(single[0])


def widen_bfloat16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Return bfloat16 numbers, given by their bits, as float32; the values are the same."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def round_to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return the bits of the bfloat16 numbers that are nearest to ``values``, ties to even. NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    # Rounded as a number, NaN could become infinite or 0. The quiet bit keeps it NaN when the low bits are cut off.
    nan = np.isnan(values)
    rounded[nan] = bits[nan] >> 16 | 0x40
    return rounded.astype(np.uint16)
