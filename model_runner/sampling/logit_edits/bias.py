"""Biases: numbers that a request adds to the logits of some tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ....messages.worker import RowInit
from ..row_params import F32, I64, RowParams
from .base import LogitEdit, RowsEdit, Upload, upload_to


class TokenBias(NamedTuple):
    """What one request adds to the logits of some tokens: [M] ids, [M] float32."""

    ids: I64
    values: F32

    @classmethod
    def of(cls, biases: Mapping[int, float], vocab_size: int) -> TokenBias | None:
        """Return the biases of known tokens, or None. A client may name tokens that the vocabulary does not have."""
        known = {token_id: value for token_id, value in biases.items() if 0 <= token_id < vocab_size}
        if not known:
            return None
        return cls(np.array(list(known), dtype=np.int64), np.array(list(known.values()), dtype=np.float32))


class Bias(LogitEdit):
    """Biases of all rows."""

    def __init__(self, max_reqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._biases: list[TokenBias | None] = [None] * max_reqs

    def start(self, init: RowInit) -> bool:
        """See the base class."""
        self._biases[init.row] = TokenBias.of(init.sampling.logit_bias, self._vocab_size)
        return self._biases[init.row] is not None

    def of(self, rows: I64, params: RowParams, positions: I64) -> BiasedRows | None:
        """See the base class."""
        biases = [self._biases[row] for row in rows.tolist()]
        return BiasedRows(biases) if any(bias is not None for bias in biases) else None

    def of_row(self, row: int) -> TokenBias | None:
        """Return the biases of one row, if it has any."""
        return self._biases[row]


class BiasedRows(RowsEdit):
    """Biases of N rows; None for rows without."""

    def __init__(self, biases: Sequence[TokenBias | None]) -> None:
        self._biases = biases

    def part(self, part: slice) -> BiasedRows:
        """See the base class."""
        return BiasedRows(self._biases[part])

    def apply(self, logits_NV: Tensor, params: RowParams, upload: Upload | None = None) -> None:
        """See the base class."""
        put, vocab = upload or upload_to(logits_NV.device), logits_NV.shape[1]
        given = [(i, bias) for i, bias in enumerate(self._biases) if bias is not None]
        if given:
            flat_M = put(np.concatenate([bias.ids + i * vocab for i, bias in given]))
            logits_NV.view(-1)[flat_M] += put(np.concatenate([bias.values for _, bias in given]))
