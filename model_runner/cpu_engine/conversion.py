"""Converts weights from the types of files with the CPU kernels, on all threads. Imports no torch."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from ..loader.arrays import BFLOAT16, FLOAT32, Array, as_bits, copy_converted
from ..loader.dequantise import dequantise
from ..loader.quantized_blocks import FORMATS
from .library import load_library
from .team import Team


class NativeFloat(IntEnum):
    """``FloatType`` of conversion.h."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2


SOURCES: dict[np.dtype[Any], NativeFloat] = {
    FLOAT32: NativeFloat.FLOAT32,
    BFLOAT16: NativeFloat.BFLOAT16,
    np.dtype(np.float16): NativeFloat.FLOAT16,
}
"""Types that the kernels convert from."""
RESULTS: dict[np.dtype[Any], NativeFloat] = {FLOAT32: NativeFloat.FLOAT32, BFLOAT16: NativeFloat.BFLOAT16}
"""Types that they convert to."""
STORED: dict[GGMLQuantizationType, np.dtype[Any]] = {
    GGMLQuantizationType.F32: FLOAT32,
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: BFLOAT16,
}
"""Types of rows of a GGUF file that are no blocks."""


class NativeConversion:
    """Converts weights on the threads of ``team``. What the kernels don't know is left to NumPy. Same results."""

    def __init__(self, team: Team) -> None:
        """Convert on ``team``. Raises ``BuildError``."""
        self._library = load_library()
        self._team = team

    def copy(self, values: Array, out: Array) -> None:
        """Copy floats to ``out``, of the same shape, and convert them to its type."""
        is_known = values.dtype in SOURCES and out.dtype in RESULTS and out.flags.c_contiguous
        if values.dtype == out.dtype or not is_known or not out.size:
            copy_converted(values, out)
            return
        dense = np.ascontiguousarray(as_bits(values))
        pair = (SOURCES[values.dtype], dense.ctypes.data, RESULTS[out.dtype], out.ctypes.data)
        self._library.pds_convert(self._team.handle, *pair, out.size)

    def dequantise(self, rows: npt.NDArray[Any], kind: GGMLQuantizationType, dtype: np.dtype[Any]) -> Array:
        """Return the numbers of a matrix [N, ...] of stored rows: quantised ones as ``dtype``, others as they are.

        Raises ``NotImplementedError`` for kinds that neither the kernels nor gguf can dequantise.
        """
        if kind in STORED:
            stored: Array = rows.view(STORED[kind])
            return stored
        if kind not in FORMATS or dtype not in RESULTS:
            return dequantise(rows, kind, dtype)
        dense, (weights, nbytes) = np.ascontiguousarray(rows), GGML_QUANT_SIZES[kind]
        out = np.empty((*rows.shape[:-1], rows.shape[-1] // nbytes * weights), dtype)
        blocks = (FORMATS[kind], dense.ctypes.data, dense.size // nbytes)
        self._library.pds_dequantise(self._team.handle, *blocks, RESULTS[dtype], out.ctypes.data)
        return out
