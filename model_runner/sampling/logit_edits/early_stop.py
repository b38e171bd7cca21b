"""The ban on tokens that end the output, until it has ``min_new_tokens``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ....messages.worker import RowInit
from ..row_params import I64, RowParams
from .base import LogitEdit, RowsEdit, Upload, upload_to


class EarlyStop(LogitEdit):
    """Stop tokens of all rows."""

    every_token: ClassVar[bool] = False

    def __init__(self, max_reqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._stop_ids: list[I64] = [np.empty(0, dtype=np.int64)] * max_reqs

    def start(self, init: RowInit) -> bool:
        """See the base class."""
        # A client may name stop tokens that the vocabulary does not have.
        known = [token for token in init.stop_ids if 0 <= token < self._vocab_size]
        self._stop_ids[init.row] = np.array(known, dtype=np.int64)
        return bool(known) and init.sampling.min_new_tokens > 0

    def of(self, rows: I64, params: RowParams, positions: I64) -> BannedTokens | None:
        """See the base class."""
        too_short = positions - params["prompt_len"] < params["min_new_tokens"]
        if not too_short.any():
            return None
        both = zip(rows.tolist(), too_short.tolist(), strict=True)
        return BannedTokens([self._stop_ids[row] if short else None for row, short in both])

    def of_row(self, row: int) -> I64:
        """Return the stop tokens of one row."""
        return self._stop_ids[row]


class BannedTokens(RowsEdit):
    """Tokens that N rows must not sample; None for rows that may sample all."""

    def __init__(self, banned: Sequence[I64 | None]) -> None:
        self._banned = banned

    def part(self, part: slice) -> BannedTokens:
        """See the base class."""
        return BannedTokens(self._banned[part])

    def apply(self, logits_NV: Tensor, params: RowParams, upload: Upload | None = None) -> None:
        """See the base class."""
        put, vocab = upload or upload_to(logits_NV.device), logits_NV.shape[1]
        flat = [ids + i * vocab for i, ids in enumerate(self._banned) if ids is not None]
        if flat:
            logits_NV.view(-1).index_fill_(0, put(np.concatenate(flat)), -torch.inf)
