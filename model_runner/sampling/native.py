"""Sampling on the CPU's vector units: the sampler's rules without a sort, a few microseconds a row.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

from ctypes import c_int32, c_int64, c_void_p

import numpy as np

from ..cpu_engine.library import check_size, load_library
from ..cpu_engine.team import Team
from .row_params import F32, I64, ROW_PARAMS, RowParams
from .sampled import F64, HostArray, Sampled


class NativeSampler:
    """Chooses tokens as ``rules.sample`` does, on ``team``'s threads or, without one, on the caller's.

    ``cpu_engine/src/sampling.cpp`` does the work.
    """

    def __init__(self, team: Team | None = None) -> None:
        """Load the CPU kernels, to sample on the threads of ``team`` (None: on the calling thread).

        Raises ``BuildError``.
        """
        self._team = team
        library = load_library()
        check_size(library, "RowParams", ROW_PARAMS.itemsize)
        self._sample = library.pds_sample
        self._sample.restype = c_int32
        self._sample.argtypes = (c_void_p, c_void_p, c_int64, c_int64, c_int64, *[c_void_p] * 4)
        self._log_sums = library.pds_log_sums
        self._log_sums.restype = None
        self._log_sums.argtypes = (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p)

    def sample(self, logits_NV: F32, params: RowParams, positions: I64) -> Sampled[HostArray]:
        """Choose the token at ``positions[i]`` of each row's request, in the CPU kernels.

        Return the tokens, and whether each row's logits were finite. Raises ``ValueError`` if the arguments' shapes
        don't fit, or if the logits of a row are not contiguous; and ``MemoryError``.
        """
        count, vocab = logits_NV.shape
        stride = _stride_of(logits_NV)
        params, positions = np.ascontiguousarray(params), np.ascontiguousarray(positions, dtype=np.int64)
        if params.dtype != ROW_PARAMS or not len(params) == len(positions) == count:
            raise ValueError(f"{len(params)} parameters and {len(positions)} positions for {count} rows of logits")
        tokens, finite = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.bool_)
        status = self._sample(
            None if self._team is None else self._team.handle,
            logits_NV.ctypes.data,
            count,
            vocab,
            stride,
            params.ctypes.data,
            positions.ctypes.data,
            tokens.ctypes.data,
            finite.ctypes.data,
        )
        if status != 0:
            raise MemoryError
        return Sampled(tokens, finite)

    def log_sums(self, logits_NV: F32, rows: I64) -> F64:
        """Return the logarithm of the sum of exponentials of each of these ``rows`` of logits, in the CPU kernels.

        Raises ``IndexError`` for rows that don't exist, and ``ValueError`` unless the logits of a row are contiguous.
        """
        sums, rows = np.empty(len(rows), dtype=np.float64), np.ascontiguousarray(rows)
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(logits_NV):
            raise IndexError(f"rows {rows.min()} to {rows.max()} of {len(logits_NV)}")
        self._log_sums(
            None if self._team is None else self._team.handle,
            logits_NV.ctypes.data,
            logits_NV.shape[1],
            _stride_of(logits_NV),
            rows.ctypes.data,
            len(rows),
            sums.ctypes.data,
        )
        return sums


def _stride_of(logits_NV: F32) -> int:
    """Return how many elements lie from one row to the next.

    Raises ``ValueError`` unless the logits of a row are contiguous.
    """
    if len(logits_NV) and logits_NV.strides[1] != logits_NV.itemsize:
        raise ValueError("the logits of a row must lie one after another")
    return logits_NV.strides[0] // logits_NV.itemsize
