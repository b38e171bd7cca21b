"""Steps that an engine computes in one call: the common ones, which want tokens and nothing else."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ...messages.base import I32
from ...messages.worker import ForwardStep
from ...runtime.layers_done import NOT_COUNTED, PassProgress
from ..sampling.row_params import I64, RowParams


class Chosen(NamedTuple):
    """Tokens that were chosen in a common step."""

    tokens: bytes
    """int32, one for each entry that samples."""
    finite: npt.NDArray[np.bool_]
    """[S]: whether the entry's logits were finite."""


class RequestTables(NamedTuple):
    """Tables of a ``HostExecutor`` that a step reads and writes. R rows, C columns."""

    req_to_token: I32
    """[R, C] int32: slot of each position."""
    last_tokens: I64
    """[R] int64: last token of each row."""
    params: RowParams
    """[R]: parameters of sampling."""
    window_pages: I32 | None
    """[P] int32, see ``ForwardBatch``."""


class CommonSteps(Protocol):
    """Computes steps in one call where it can."""

    def run(self, step: ForwardStep, done: PassProgress = NOT_COUNTED) -> Chosen | None:
        """Compute ``step`` in one call, and return its tokens; ``done`` counts the layers that have written their KV.

        The caller has already applied the step's ``new_rows`` and ``slot_deltas``. Return None, with nothing changed,
        if the step can't be computed so, as when it asks for more than tokens. The executor then computes it part by
        part.
        """
        ...


class _GeneralSteps:
    """Leaves every step to the general way."""

    def run(self, step: ForwardStep, done: PassProgress = NOT_COUNTED) -> Chosen | None:
        """Return None for every step, so that the executor computes it part by part."""
        return None


ALL_GENERAL: CommonSteps = _GeneralSteps()
"""Common steps of an engine that computes every step the general way."""
