"""Sampling on the CPU's vector units: the sampler's rules without a sort, a few microseconds a row.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

from ctypes import c_int32, c_int64, c_void_p

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ..cpu_engine.library import check_size, load_library
from ..cpu_engine.team import Team
from .row_params import ROW_PARAMS, RowParams

I64 = npt.NDArray[np.int64]


class NativeSampler:
    """Chooses tokens as ``rules.sample`` does, on ``team``'s threads or, without one, on the caller's.

    ``cpu_engine/src/sampling.cpp`` does the work.
    """

    def __init__(self, team: Team | None = None) -> None:
        """Raises ``BuildError`` where the kernels can't be had."""
        self._team = team
        library = load_library()
        check_size(library, "RowParams", ROW_PARAMS.itemsize)
        self._sample = library.pds_sample
        self._sample.restype = c_int32
        self._sample.argtypes = (c_void_p, c_void_p, c_int64, c_int64, c_int64, *[c_void_p] * 4)

    def sample(self, logits_NV: Tensor, params: RowParams, positions: I64) -> tuple[I64, npt.NDArray[np.bool_]]:
        """Tokens [N] and whether each row was finite [N]. ``logits_NV``: float32 on the CPU, rows contiguous."""
        count, vocab = logits_NV.shape
        if logits_NV.stride(1) != 1:
            raise ValueError("the logits of a row must lie one after another")
        params, positions = np.ascontiguousarray(params), np.ascontiguousarray(positions, dtype=np.int64)
        if params.dtype != ROW_PARAMS or not len(params) == len(positions) == count:
            raise ValueError(f"{len(params)} parameters and {len(positions)} positions for {count} rows of logits")
        tokens, finite = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.bool_)
        status = self._sample(
            None if self._team is None else self._team.handle,
            logits_NV.data_ptr(),
            count,
            vocab,
            logits_NV.stride(0),
            params.ctypes.data,
            positions.ctypes.data,
            tokens.ctypes.data,
            finite.ctypes.data,
        )
        if status != 0:
            raise MemoryError
        return tokens, finite
