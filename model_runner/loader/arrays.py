"""Weights as NumPy arrays of every type that files have, and their conversion, without torch.

NumPy has neither bfloat16 nor FP8. An array of such numbers has a structured dtype with one field. The field has the
name that torch has for the type, and holds the number's bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ..dtypes import round_to_bfloat16, widen_bfloat16

Array = npt.NDArray[Any]

FLOAT32 = np.dtype(np.float32)
BFLOAT16 = np.dtype([("bfloat16", np.uint16)])
FLOAT8_E4M3FN = np.dtype([("float8_e4m3fn", np.uint8)])
FLOAT8_E5M2 = np.dtype([("float8_e5m2", np.uint8)])
BIT_FLOATS = (BFLOAT16, FLOAT8_E4M3FN, FLOAT8_E5M2)
"""Types of floats that NumPy does not know."""
PIECE = 1 << 18
"""Number of elements that are converted at once, so that what lies between stays in the caches."""


def type_name(dtype: np.dtype[Any]) -> str:
    """Return the name that torch has for a type: "bfloat16", "float32", "int8"."""
    return dtype.name if dtype.names is None else dtype.names[0]


def float_type(name: str) -> np.dtype[Any]:
    """Return the dtype of the arrays that hold floats of the type that torch calls ``name``."""
    return next((dtype for dtype in BIT_FLOATS if type_name(dtype) == name), None) or np.dtype(name)


def unknown_type(name: str) -> np.dtype[Any]:
    """Return a dtype for numbers that can't be read here, of the type ``name``. ``is_float`` is false of it."""
    return np.dtype([(name, np.uint8)])


def is_float(dtype: np.dtype[Any]) -> bool:
    """Return whether the elements are floats that ``widen`` knows."""
    return dtype in BIT_FLOATS or dtype.kind == "f"


def as_bits(values: Array) -> Array:
    """Return a view of the elements that NumPy moves fast: the bits of types that it does not know."""
    return values if values.dtype.names is None else values.view(values.dtype[0])


def take_rows(values: Array, rows: npt.NDArray[np.int64]) -> Array:
    """Return a copy of ``values`` [N, ...] with the rows ``rows``, in this order."""
    return as_bits(values)[rows].view(values.dtype)


def widen(values: Array) -> npt.NDArray[np.float32]:
    """Return floats as float32. Those of float64 are rounded; the others keep their values. May return ``values``."""
    if values.dtype == BFLOAT16:
        return widen_bfloat16(as_bits(values))
    if values.dtype == FLOAT8_E4M3FN:
        return _e4m3fn_values()[as_bits(values)]
    if values.dtype == FLOAT8_E5M2:
        # The upper byte of a float16.
        return (as_bits(values).astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(np.float32, copy=False)


def convert(values: Array, dtype: np.dtype[Any]) -> Array:
    """Return floats as ``dtype``, rounded to the nearest, ties to even. They pass through float32, as torch does it.

    ``dtype`` is float32, bfloat16 or float16, or that of ``values``, which then may be returned.
    """
    if values.dtype == dtype:
        return values
    singles = widen(values)
    if dtype == BFLOAT16:
        # In one dimension: of no dimension, NumPy makes numbers that can't be written to.
        return round_to_bfloat16(singles.reshape(-1)).view(BFLOAT16).reshape(values.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        return singles.astype(dtype, copy=False)


def copy_converted(values: Array, out: Array) -> None:
    """Copy floats to ``out``, of the same shape, and convert them to its type."""
    if values.dtype == out.dtype or values.ndim == 0:
        as_bits(out)[...] = as_bits(convert(values, out.dtype))
        return
    for piece in _pieces(values.shape):
        as_bits(out[piece])[...] = as_bits(convert(values[piece], out.dtype))


def have_same_values(one: Array, other: Array) -> bool:
    """Return whether both have the same shape and, whatever their types, exactly the same values."""
    if one.shape != other.shape:
        return False
    return all(np.array_equal(_exactly(one[piece]), _exactly(other[piece])) for piece in _pieces(one.shape))


def _exactly(values: Array) -> Array:
    """Return the same values, as numbers that NumPy can compare with others."""
    if not is_float(values.dtype):
        return as_bits(values)
    return values if values.dtype == np.float64 else widen(values)


def _pieces(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Yield slices of rows that together are all of them, each of about ``PIECE`` elements."""
    if not shape:
        yield ()
        return
    count = shape[0]
    step = max(1, PIECE * count // max(1, int(np.prod(shape))))
    for begin in range(0, count, step):
        yield (slice(begin, begin + step),)


@cache
def _e4m3fn_values() -> npt.NDArray[np.float32]:
    """Return the value of each of the 256 numbers of FP8 (E4M3)."""
    codes = np.arange(256)
    exponents, mantissas = codes >> 3 & 15, codes & 7
    sizes = np.where(exponents == 0, mantissas * 2.0**-9, (8 + mantissas) * 2.0 ** (exponents - 10.0))
    sizes[codes & 0x7F == 0x7F] = np.nan
    return np.where(codes >> 7, -sizes, sizes).astype(np.float32)
