"""Dequantises the rows of a GGUF file with the gguf package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType

from .arrays import FLOAT32, Array, convert

Dequantise = Callable[[npt.NDArray[Any], GGMLQuantizationType, np.dtype[Any]], Array]
"""Returns the numbers of a matrix [N, ...] of stored rows: quantised ones as the dtype, others of any float type.

Raises ``NotImplementedError`` for an unknown kind.
"""
JOINED_BYTES = 1 << 16
"""Maximum bytes of rows that are dequantised as one row."""


def dequantise(data: npt.NDArray[Any], kind: GGMLQuantizationType, dtype: np.dtype[Any] = FLOAT32) -> Array:
    """Return the numbers of a matrix [N, ...] of stored rows as ``dtype``.

    Raises ``NotImplementedError`` for kinds that gguf can't dequantise.

    gguf takes 16 rows at a time. Rows that lie one after another are joined, so that each piece is large enough.
    """
    rows = np.asarray(data)  # slices of a ``memmap`` cost several times those of a plain array
    count, joined = len(rows), 1
    while rows.ndim == 2 and count % (2 * joined) == 0 and 2 * joined * rows[0].nbytes <= JOINED_BYTES:
        joined *= 2
    values: npt.NDArray[Any] = gguf.dequantize(rows.reshape(count // joined, -1) if joined > 1 else rows, kind)
    return convert(values.reshape(count, -1) if joined > 1 else values, dtype)
