"""What changes a row's logits before a token is chosen: a request's biases, penalties on tokens seen, and the ban on
stopping too early.

A history lives as long as its request holds its row: made from ``RowInit.history`` (prompt, then output so far), grown
by one token each time the worker samples for the row, dropped when the row gets its next request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]


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


class TokenBias(NamedTuple):
    """What one request adds to the logits of some tokens: [M] ids, [M] float32."""

    ids: I64
    values: F32

    @classmethod
    def of(cls, biases: Mapping[int, float], vocab_size: int) -> TokenBias | None:
        """None where there are none. A client may name tokens that the vocabulary does not have."""
        known = {token_id: value for token_id, value in biases.items() if 0 <= token_id < vocab_size}
        if not known:
            return None
        return cls(np.array(list(known), dtype=np.int64), np.array(list(known.values()), dtype=np.float32))


class LogitEdits(NamedTuple):
    """What changes N rows of logits; None where nothing does. ``banned``: tokens that must not be sampled."""

    histories: Sequence[TokenHistory | None]
    banned: Sequence[I64 | None]
    biases: Sequence[TokenBias | None]

    def of(self, part: slice) -> LogitEdits:
        """The same for some of the rows."""
        return LogitEdits(self.histories[part], self.banned[part], self.biases[part])


Upload = Callable[[npt.NDArray[Any]], Tensor]
"""Puts an array where the logits are (``Device.upload``)."""


def add_biases(logits_NV: Tensor, biases: Sequence[TokenBias | None], upload: Upload | None = None) -> None:
    """Add each row's biases to its logits, in place."""
    put, vocab = upload or _to(logits_NV.device), logits_NV.shape[1]
    given = [(i, bias) for i, bias in enumerate(biases) if bias is not None]
    if given:
        flat_M = put(np.concatenate([bias.ids + i * vocab for i, bias in given]))
        logits_NV.view(-1)[flat_M] += put(np.concatenate([bias.values for _, bias in given]))


def apply_penalties(
    logits_NV: Tensor, histories: Sequence[TokenHistory | None], repetition_N: F32, frequency_N: F32, presence_N: F32
) -> None:
    """Change the logits, in place, of the rows that have a history.

    Repetition first (prompt and output: positive logits are divided, negative ones multiplied), then frequency times
    the output count, then presence once for each token that was output.
    """
    rows = [i for i, history in enumerate(histories) if history is not None]
    seen = [history for history in histories if history is not None]
    if not seen:
        return
    vocab = logits_NV.shape[1]
    sizes = [len(history.ids) for history in seen]
    flat = np.concatenate([history.ids + i * vocab for i, history in zip(rows, seen, strict=True)])
    counts = np.concatenate([history.output_counts for history in seen])
    # One array to subtract leaves the device one rounding: a fused multiply-add in only the vectorised part of a loop
    # would make a logit depend on its place in the batch.
    minus = np.repeat(frequency_N[rows], sizes) * counts + np.repeat(presence_N[rows], sizes) * (counts > 0)
    device = logits_NV.device
    flat_M = torch.from_numpy(flat).to(device)
    repetition_M = torch.from_numpy(np.repeat(repetition_N[rows], sizes)).to(device)
    old_M = logits_NV.view(-1)[flat_M]
    new_M = torch.where(old_M > 0, old_M / repetition_M, old_M * repetition_M) - torch.from_numpy(minus).to(device)
    logits_NV.view(-1)[flat_M] = new_M


def ban_tokens(logits_NV: Tensor, banned: Sequence[I64 | None], upload: Upload | None = None) -> None:
    """Give the banned tokens of each row, in place, no chance at all."""
    put, vocab = upload or _to(logits_NV.device), logits_NV.shape[1]
    flat = [ids + i * vocab for i, ids in enumerate(banned) if ids is not None]
    if flat:
        logits_NV.view(-1).index_fill_(0, put(np.concatenate(flat)), -torch.inf)


def _to(device: torch.device) -> Upload:
    return lambda array: torch.from_numpy(array).to(device)
