"""Penalties on tokens that a request has seen: repetition, frequency and presence.

A history lives as long as its request holds its row. It is made from ``RowInit.history`` (prompt, then output so far).
It grows by one token each time the worker samples for the row, and is dropped when the row gets its next request. It is
for processors that have finished a step when it returns. ``device_penalties.py`` is for the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ....messages.base import unpack_i32
from ....messages.worker import RowInit
from ..row_params import F32, I64, RowParams
from .base import LogitEdit, RowsEdit, Upload


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
        """Count one more output token."""
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
        """Distinct tokens of prompt and output (a view)."""
        return self._ids[: self._size]

    @property
    def output_counts(self) -> F32:
        """How often each of ``ids`` was output; 0 for those of the prompt only (a view)."""
        return self._counts[: self._size]


class Penalties(LogitEdit):
    """Histories of all rows."""

    def __init__(self, max_reqs: int) -> None:
        self._histories: list[TokenHistory | None] = [None] * max_reqs

    def start(self, init: RowInit) -> bool:
        """See the base class."""
        history = None if init.history is None else TokenHistory(unpack_i32(init.history), init.prompt_len)
        self._histories[init.row] = history
        return history is not None

    def of(self, rows: I64, params: RowParams, positions: I64) -> PenalisedRows | None:
        """See the base class."""
        histories = [self._histories[row] for row in rows.tolist()]
        return PenalisedRows(histories) if any(history is not None for history in histories) else None

    def histories(self, rows: I64, params: RowParams) -> list[tuple[int, TokenHistory]]:
        """Return the histories of the rows [N] that have one, each with its place among them.

        A history is told of its tokens when they are known, even if another request has its row by then.
        """
        penalised = np.flatnonzero(params["penalised"]).tolist()
        found = [(i, self._histories[int(rows[i])]) for i in penalised]
        return [(i, history) for i, history in found if history is not None]


class PenalisedRows(RowsEdit):
    """Histories of N rows; None for rows without penalties."""

    def __init__(self, histories: Sequence[TokenHistory | None]) -> None:
        self._histories = histories

    def part(self, part: slice) -> PenalisedRows:
        """See the base class."""
        return PenalisedRows(self._histories[part])

    def apply(self, logits_NV: Tensor, params: RowParams, upload: Upload | None = None) -> None:
        """Penalise repetition first, then frequency and presence.

        Repetition counts prompt and output: positive logits are divided, negative ones multiplied. The frequency
        penalty is subtracted once for each time that the token was output, the presence penalty once.
        """
        rows = [i for i, history in enumerate(self._histories) if history is not None]
        seen = [history for history in self._histories if history is not None]
        if not seen:
            return
        repetition_N, frequency_N, presence_N = (
            params[f"{name}_penalty"] for name in ("repetition", "frequency", "presence")
        )
        vocab = logits_NV.shape[1]
        sizes = [len(history.ids) for history in seen]
        flat = np.concatenate([history.ids + i * vocab for i, history in zip(rows, seen, strict=True)])
        counts = np.concatenate([history.output_counts for history in seen])
        # One array to subtract leaves the device one rounding. A fused multiply-add in only the vectorised part of a
        # loop would make a logit depend on its index in the batch.
        minus = np.repeat(frequency_N[rows], sizes) * counts + np.repeat(presence_N[rows], sizes) * (counts > 0)
        device = logits_NV.device
        flat_M = torch.from_numpy(flat).to(device)
        repetition_M = torch.from_numpy(np.repeat(repetition_N[rows], sizes)).to(device)
        old_M = logits_NV.view(-1)[flat_M]
        new_M = torch.where(old_M > 0, old_M / repetition_M, old_M * repetition_M) - torch.from_numpy(minus).to(device)
        logits_NV.view(-1)[flat_M] = new_M
