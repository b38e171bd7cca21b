"""The model worker's table of sampling parameters, one row a request: its columns and their types."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...messages.sampling import COLUMNS

I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]

NO_LOGPROBS = -1

ROW_PARAMS = np.dtype(
    [
        # As the request has them, but: top_p is infinity for everything, and top_k 0 for the whole vocabulary.
        *((name, column.dtype) for name, column in COLUMNS.items()),
        ("prompt_len", np.int64),
        ("logprobs", np.int32),  # alternatives to list, or NO_LOGPROBS
        ("greedy", np.bool_),
        ("penalised", np.bool_),  # or biased: its logits are changed before every token
    ],
    align=True,
)
"""``RowParams`` of the CPU kernels' sampling.h, which read the table as it is."""
PARAM_NAMES: tuple[str, ...] = ROW_PARAMS.names or ()
RowParams = npt.NDArray[np.void]
