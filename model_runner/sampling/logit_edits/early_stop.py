"""The ban on tokens that end the output, until it has ``min_new_tokens``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from ....messages.worker import RowInit
from ..row_params import I64, RowParams
from .base import LogitEdit, Places, SparseEdit, Upload


class EarlyStop(LogitEdit["BannedTokens"]):
    """Stop tokens of all rows."""

    every_token: ClassVar[bool] = False

    def __init__(self, max_reqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._stop_ids: list[I64] = [np.empty(0, dtype=np.int64)] * max_reqs

    def start(self, init: RowInit) -> bool:
        """Keep those of the request's stop tokens that the vocabulary has.

        Return whether ``min_new_tokens`` will ban any of them at first: there are stop tokens, and it is above 0.
        """
        # A client may name stop tokens that the vocabulary does not have.
        known = [token for token in init.stop_ids if 0 <= token < self._vocab_size]
        self._stop_ids[init.row] = np.array(known, dtype=np.int64)
        return bool(known) and init.sampling.min_new_tokens > 0

    def of(self, rows: I64, params: RowParams, positions: I64) -> BannedTokens | None:
        """Return the stop tokens of rows with fewer than ``min_new_tokens`` output tokens; None if no row has any."""
        too_short = positions - params["prompt_len"] < params["min_new_tokens"]
        found = ((i, self._stop_ids[int(rows[i])]) for i in np.flatnonzero(too_short).tolist())
        banned = [(i, ids) for i, ids in found if len(ids)]
        return BannedTokens(banned) if banned else None

    def of_row(self, row: int) -> I64:
        """Return the ids of the stop tokens of the request in ``row``; empty if it has none."""
        return self._stop_ids[row]


class BannedTokens(SparseEdit):
    """Tokens that some rows of a step must not sample, each row by its place among them."""

    def __init__(self, banned: Sequence[tuple[int, I64]]) -> None:
        self._places = Places.of(banned)

    def places(self) -> Places:
        """Return the banned tokens of each row that has any."""
        return self._places

    def new_values(self, old_M: Any, params: RowParams, upload: Upload) -> Any:
        """Return -inf for each banned token, so that it is never chosen."""
        # Of a number a device would wait for the host's copy.
        return upload(np.full(len(self._places.ids), -np.inf, dtype=np.float32))
