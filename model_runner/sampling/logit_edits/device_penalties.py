"""Penalties with counts on the device: a row's next token is penalised before the host knows the previous one.

Counted are the tokens that each penalised row's request has seen, and how often it had them as output. A row of counts
lives as long as the request's row: from its ``RowInit`` to the next one.

Shapes: N sampled rows, M of them penalised, V vocabulary, P rows of counts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ....messages.base import unpack_i32
from ....messages.worker import RowInit
from ...device.base import Device
from ..row_params import I64, RowParams
from .base import LogitEdit, RowsEdit, Upload

UNSEEN = -1
FIRST_ROWS = 4


class DevicePenalties(LogitEdit["SeenRows"]):
    """``counts``: [P, V] int32, -1 for tokens that were not seen, else how often they were output."""

    def __init__(self, device: Device, vocab_size: int) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self.counts = torch.empty((0, vocab_size), dtype=torch.int32, device=device.torch)
        self._places: dict[int, int] = {}
        self._free: list[int] = []

    def start(self, init: RowInit) -> bool:
        """Start the penalties of the request that takes ``init.row``.

        The counts of the row's last request are freed. Counting the new one's known tokens is queued.
        Return False if ``init.history`` is None: the request asked for no penalties.
        """
        self.stop(init.row)
        if init.history is None:
            return False
        self.take(init.row, unpack_i32(init.history), init.prompt_len)
        return True

    def take(self, row: int, tokens: npt.NDArray[np.int32], prompt_len: int) -> None:
        """Give ``row`` counts on the device, and count ``tokens``, a request's prompt and output so far.

        Those from ``prompt_len`` on count as output, the others only as seen. Counts of the row's last request are
        freed first. If no place is free, the device's table of counts grows.
        """
        self.stop(row)
        if not self._free:
            self._grow()
        place = self._places[row] = self._free.pop()
        distinct, where = np.unique(tokens, return_inverse=True)
        counts = np.bincount(where[prompt_len:], minlength=len(distinct)).astype(np.int32)
        own = self.counts[place]
        own.fill_(UNSEEN)
        own.index_copy_(0, self._device.upload(distinct.astype(np.int64)), self._device.upload(counts))

    def stop(self, row: int) -> None:
        """Free the counts of ``row`` for other rows; do nothing if it has none."""
        if (place := self._places.pop(row, None)) is not None:
            self._free.append(place)

    def of(self, rows: I64, params: RowParams, positions: I64) -> SeenRows | None:
        """Return the penalties of those ``rows`` that have counts on the device; None if no row has."""
        at = [i for i, row in enumerate(rows.tolist()) if row in self._places]
        if not at:
            return None
        places = [self._places[int(rows[i])] for i in at]
        return SeenRows(self, np.array(at, dtype=np.int64), np.array(places, dtype=np.int64))

    def _grow(self) -> None:
        old = len(self.counts)
        grown = torch.empty(
            (max(FIRST_ROWS, 2 * old), self._vocab_size), dtype=self.counts.dtype, device=self._device.torch
        )
        grown[:old] = self.counts
        self.counts = grown
        self._free = list(range(old, len(grown)))

    def put(self, array: npt.NDArray[np.generic]) -> Tensor:
        """Queue a copy of ``array`` from the host to the device, and return the device's tensor."""
        return self._device.upload(array)


class SeenRows(RowsEdit):
    """The penalised ones among the rows of one step."""

    def __init__(self, seen: DevicePenalties, at: I64, places: I64) -> None:
        self._seen = seen
        self._rows = at
        self._at_M, self._places_M = seen.put(at), seen.put(places)

    def apply(self, logits_NV: Tensor, params: RowParams, upload: Upload) -> None:
        """Queue the change of the penalised rows' logits on the device.

        The arithmetic is that of ``PenalisedRows``, operation by operation, so that the host would choose the same
        tokens.
        """
        names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
        values = np.stack([params[name][self._rows] for name in names]).astype(np.float32)
        repetition_M1, frequency_M1, presence_M1 = self._seen.put(values).unsqueeze(2)
        old_MV = logits_NV.index_select(0, self._at_M)
        counts_MV = self._seen.counts.index_select(0, self._places_M)
        output_MV = counts_MV.clamp(min=0).to(torch.float32)
        minus_MV = frequency_M1 * output_MV + presence_M1 * (output_MV > 0)
        new_MV = torch.where(old_MV > 0, old_MV / repetition_M1, old_MV * repetition_M1) - minus_MV
        logits_NV.index_copy_(0, self._at_M, torch.where(counts_MV >= 0, new_MV, old_MV))

    def count(self, tokens_N: Tensor) -> None:
        """Queue counting the chosen tokens as output of the penalised rows, on the device.

        ``tokens_N``: the token that each of the batch's N rows has chosen. Rows without penalties are skipped.
        """
        where = (self._places_M, tokens_N.index_select(0, self._at_M))
        self._seen.counts[where] = self._seen.counts[where].clamp(min=0) + 1
