"""Biases: numbers that a request adds to the logits of some tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ....messages.worker import RowInit
from ..row_params import F32, I64, RowParams
from .base import LogitEdit, Places, SparseEdit, Upload


class TokenBias(NamedTuple):
    """What one request adds to the logits of some tokens: [M] ids, [M] float32."""

    ids: I64
    values: F32

    @classmethod
    def of(cls, biases: Mapping[int, float], vocab_size: int) -> TokenBias | None:
        """Return a request's biases as arrays, or None if it has none.

        Token ids that the vocabulary does not have are left out, as a client may name some.
        """
        known = {token_id: value for token_id, value in biases.items() if 0 <= token_id < vocab_size}
        if not known:
            return None
        return cls(np.array(list(known), dtype=np.int64), np.array(list(known.values()), dtype=np.float32))


class Bias(LogitEdit["BiasedRows"]):
    """Biases of all rows."""

    def __init__(self, max_reqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._biases: list[TokenBias | None] = [None] * max_reqs

    def start(self, init: RowInit) -> bool:
        """Keep the request's biases of tokens that the vocabulary has. Return whether there are any."""
        self._biases[init.row] = TokenBias.of(init.sampling.logit_bias, self._vocab_size)
        return self._biases[init.row] is not None

    def of(self, rows: I64, params: RowParams, positions: I64) -> BiasedRows | None:
        """Return the biases of those ``rows`` that have any, at every position; None if no row has."""
        found = ((i, self._biases[row]) for i, row in enumerate(rows.tolist()))
        biases = [(i, bias) for i, bias in found if bias is not None]
        return BiasedRows(biases) if biases else None

    def of_row(self, row: int) -> TokenBias | None:
        """Return the biases of the request in ``row``, or None if it has none."""
        return self._biases[row]


class BiasedRows(SparseEdit):
    """Biases of some rows of a step, each with its place among them."""

    def __init__(self, biases: Sequence[tuple[int, TokenBias]]) -> None:
        self._biases = biases

    def places(self) -> Places:
        """Return the biased tokens of each row that has any."""
        return Places.of([(i, bias.ids) for i, bias in self._biases])

    def new_values(self, old_M: Any, params: RowParams, upload: Upload) -> Any:
        """Return the old logits ``old_M`` of ``places``, in its order, each plus its token's bias.

        The biases are those that this object was made with. ``upload`` copies them to where ``old_M`` is.
        ``params`` is not used.
        """
        return old_M + upload(np.concatenate([bias.values for _, bias in self._biases]))
