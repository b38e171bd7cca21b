"""Sampler on a device by Triton kernels: two launches if all rows are greedy, else five.

Rows have their parameters on the device. Rows with edited logits also have a *place* there
(``sampling/triton/row_table.py``). A row keeps its place until another request takes the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ....messages.base import unpack_i32
from ....messages.worker import RowInit
from ...device.base import Device
from ..row_params import I64, RowParams
from ..rows import RowStates
from ..sampled import Sampled, Scored
from ..triton.row_table import (
    NO_EDITS,
    EditLists,
    join_edits,
    list_edits,
    make_table,
    pack_words,
    start_rows,
    write_edits,
)
from ..triton.sampling import make_work, sample
from ..triton.token_logprobs import MAX_BEST, make_logprob_work, token_logprobs
from .base import DeviceSampler, SampledRows
from .logprobs import score

BATCH = 256
"""Rows of one set of launches; more take several. What a set works in is 11 MB for a vocabulary of 128,256."""
FIRST_PLACES = 4


class TritonSampler(DeviceSampler):
    """On CUDA devices; on the host's memory in Triton's interpreter."""

    reads_halves = True

    def __init__(self, device: Device, states: RowStates[Tensor], logits_dtype: torch.dtype = torch.float32) -> None:
        """Allocate the device's tables, and compile the kernels now. ``logits_dtype``: type of the logits to come."""
        self._logits_dtype = logits_dtype
        self._device = device
        self._states = states
        vocab, there = states.vocab_size, device.torch
        self._table = make_table(len(states.table), vocab, FIRST_PLACES, there, states.last_tokens)
        self._work = make_work(min(BATCH, len(states.table)), vocab, there)
        self._scoring = make_logprob_work(BATCH, vocab, MAX_BEST, there)
        self._places: dict[int, int] = {}
        self._free = list(range(FIRST_PLACES))
        self._compile()

    def start(self, inits: Sequence[RowInit]) -> None:
        """Queue writes of the rows' parameters to the device's table, and of the logit edits of rows that have any.

        The place of the row's last request among the edits is freed first. If no place is free, there become twice as
        many.
        """
        rows = np.array([init.row for init in inits], dtype=np.int64)
        for row in rows.tolist():
            if (place := self._places.pop(row, None)) is not None:
                self._free.append(place)
        places = np.full(len(rows), NO_EDITS, dtype=np.int64)
        edited = [i for i, init in enumerate(inits) if self._states.is_edited(init.row)]
        for i in edited:
            places[i] = self._places[inits[i].row] = self._take()
        lists = [self._edits_of(inits[i], int(places[i])) for i in edited]
        put = self._device.upload
        start_rows(self._table, put(rows), put(pack_words(self._words_of(inits, rows), places)))
        if lists:
            write_edits(self._table, put(places[edited]), *(put(part) for part in join_edits(lists)))

    def sample(self, logits_SV: Tensor, sampled: SampledRows) -> Sampled[Tensor]:
        """Queue Triton kernels that choose the tokens, for up to ``BATCH`` rows at a time.

        A part takes two kernels if all of its rows are greedy, else five.
        """
        count = len(sampled.rows)
        tokens_S = torch.empty(count, dtype=torch.int64, device=logits_SV.device)
        finite_S = torch.empty(count, dtype=torch.bool, device=logits_SV.device)
        for begin in range(0, count, BATCH):
            part = slice(begin, begin + BATCH)
            places = sampled.rows_there[part], sampled.positions_there[part], tokens_S[part], finite_S[part]
            draws = not sampled.params["greedy"][part].all()
            sample(logits_SV[part], self._table, *places, self._work, draws=draws)
        return Sampled(tokens_S, finite_S)

    def score(self, logits_NV: Tensor, targets_N: Tensor, most: int) -> Scored[Tensor]:
        """Queue Triton kernels that compute the log-probabilities, for ``BATCH`` rows at a time.

        More than ``MAX_BEST`` alternatives are left to torch.
        """
        most = min(most, logits_NV.shape[1])
        if most > MAX_BEST:
            return score(logits_NV, targets_N, most)
        count, there = len(targets_N), logits_NV.device
        chosen_N = torch.empty(count, dtype=torch.float32, device=there)
        ids_NK = torch.empty((count, most), dtype=torch.int64, device=there)
        best_NK = torch.empty((count, most), dtype=torch.float32, device=there)
        for begin in range(0, count, BATCH):
            part = slice(begin, begin + BATCH)
            outs = chosen_N[part], ids_NK[part], best_NK[part]
            token_logprobs(logits_NV[part], targets_N[part], *outs, self._scoring)
        return Scored(targets_N, chosen_N, ids_NK, best_NK)

    def _edits_of(self, init: RowInit, place: int) -> EditLists:
        history = b"" if init.history is None else init.history
        stop_ids, bias = self._states.early_stop.of_row(init.row), self._states.bias.of_row(init.row)
        return list_edits(place, unpack_i32(history).astype(np.int64), init.prompt_len, stop_ids, bias)

    def _words_of(self, inits: Sequence[RowInit], rows: I64) -> RowParams:
        """Return the sampling parameters of ``rows`` as the device's table takes them.

        They are the parameters on the host, but with neutral penalties for requests without a history. The host does
        not penalise these either; the device would, as it counts the output of each row with other edits.
        """
        params = self._states.params(rows)
        unseen = np.array([init.history is None for init in inits])
        for name, nothing in (("frequency", 0.0), ("presence", 0.0), ("repetition", 1.0)):
            params[f"{name}_penalty"][unseen] = nothing
        return params

    def _take(self) -> int:
        if not self._free:
            old = len(self._table.counts)
            counts, biases = (
                torch.cat((part, torch.empty_like(part))) for part in (self._table.counts, self._table.biases)
            )
            self._table = replace(self._table, counts=counts, biases=biases)
            self._free = list(range(old, 2 * old))
        return self._free.pop()

    def _compile(self) -> None:
        """Launch each kernel once without rows, as the first launch compiles it for a second."""
        put, vocab = self._device.upload, self._states.vocab_size
        no_row, zero = put(np.array([-1])), put(np.array([0]))
        logits = torch.zeros((1, vocab), dtype=self._logits_dtype, device=self._device.torch)
        finite = torch.empty(1, dtype=torch.bool, device=self._device.torch)
        for draws in (True, False):
            sample(logits, self._table, no_row, zero, zero.clone(), finite, self._work, draws=draws)
        self.score(logits, zero, 1)
        one = list_edits(0, np.array([0]), 0, np.empty(0, dtype=np.int64), None)
        write_edits(self._table, zero, *(put(part) for part in one))
