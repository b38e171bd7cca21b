"""Penalties on tokens that a request has seen: repetition, frequency and presence.

A history lives as long as its request holds its row. It is made from ``RowInit.history`` (prompt, then output so far).
It grows by one token each time the worker samples for the row, and is dropped when the row gets its next request. It is
for processors that have finished a step when it returns. ``device_penalties.py`` is for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ....messages.base import unpack_i32
from ....messages.worker import RowInit
from ..row_params import F32, I64, RowParams
from .base import LogitEdit, Places, SparseEdit, Upload


class TokenHistory:
    """The distinct tokens of one request's prompt and output, and how often each was output.

    Sparse: a penalty costs time by the tokens seen, not by the vocabulary, and rows without penalties cost nothing.
    """

    def __init__(self, tokens: npt.NDArray[np.int32], prompt_len: int) -> None:
        distinct, where = np.unique(tokens, return_inverse=True)
        self._size = len(distinct)
        self._ids = np.zeros(self._size + 64, dtype=np.int64)
        self._counts = np.zeros(self._size + 64, dtype=np.float32)
        self._ids[: self._size] = distinct
        self._counts[: self._size] = np.bincount(where[prompt_len:], minlength=self._size)
        self._index = {int(token): i for i, token in enumerate(distinct)}

    def append(self, token: int) -> None:
        """Count ``token`` as output once more."""
        i = self._index.get(token)
        if i is None:
            if self._size == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            i = self._index[token] = self._size
            self._ids[i] = token
            self._size += 1
        self._counts[i] += 1

    @property
    def ids(self) -> I64:
        """Distinct tokens of prompt and output, as a view that ``append`` may change."""
        return self._ids[: self._size]

    @property
    def output_counts(self) -> F32:
        """How often each of ``ids`` was output, 0 for those of the prompt only; a view that ``append`` may change."""
        return self._counts[: self._size]


class Penalties(LogitEdit["PenalisedRows"]):
    """Histories of all rows."""

    def __init__(self, max_reqs: int) -> None:
        self._histories: list[TokenHistory | None] = [None] * max_reqs

    def start(self, init: RowInit) -> bool:
        """Count the tokens of the request's history. Return False if it has none: it has no penalties then."""
        history = None if init.history is None else TokenHistory(unpack_i32(init.history), init.prompt_len)
        self._histories[init.row] = history
        return history is not None

    def of(self, rows: I64, params: RowParams, positions: I64) -> PenalisedRows | None:
        """Return the penalties of those ``rows`` that have a history; None if no row has."""
        histories = self.histories(rows, params)
        return PenalisedRows(histories) if histories else None

    def histories(self, rows: I64, params: RowParams) -> list[tuple[int, TokenHistory]]:
        """Return the token histories of the penalised rows among ``rows`` [N], each with its index there."""
        penalised = np.flatnonzero(params["penalised"]).tolist()
        found = [(i, self._histories[int(rows[i])]) for i in penalised]
        return [(i, history) for i, history in found if history is not None]


class PenalisedRows(SparseEdit):
    """Histories of some rows of a step, each with its place among them."""

    def __init__(self, histories: Sequence[tuple[int, TokenHistory]]) -> None:
        self._histories = histories

    def places(self) -> Places:
        """Return all distinct tokens of each row's prompt and output."""
        return Places.of([(i, history.ids) for i, history in self._histories])

    def new_values(self, old_M: Any, params: RowParams, upload: Upload) -> Any:
        """Return the logits after repetition, then frequency and presence penalties.

        Repetition counts prompt and output: positive logits are divided, negative ones multiplied. The frequency
        penalty is subtracted once for each time that the token was output, the presence penalty once.
        """
        own = params[[i for i, _ in self._histories]]
        sizes = [len(history.ids) for _, history in self._histories]
        counts = np.concatenate([history.output_counts for _, history in self._histories])
        repetition_M, frequency_M, presence_M = (
            np.repeat(own[f"{name}_penalty"], sizes) for name in ("repetition", "frequency", "presence")
        )
        # One array to subtract leaves one rounding. A fused multiply-add in only the vectorised part of a loop would
        # make a logit depend on its index in the batch.
        minus = frequency_M * counts + presence_M * (counts > 0)
        return np.where(old_M > 0, old_M / repetition_M, old_M * repetition_M) - minus
