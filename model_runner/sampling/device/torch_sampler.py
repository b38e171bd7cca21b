"""Sampler on a device, made of operations of torch.

The sampler of a CPU reads as few of a row's probabilities as will do. This one sorts them all, which a device does
quickly. Rows with logits that are not finite are drawn from like the others, and their tokens mean nothing.

Shapes: S sampled rows, N of them drawn, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ....messages.worker import RowInit
from ...device.base import Device
from ..draws import CANDIDATES, DrawnRows, drop_tails, from_all, from_sorted, from_top_k
from ..logit_edits.base import LogitEdit, RowsEdit, find_edits
from ..logit_edits.device_penalties import DevicePenalties
from ..row_params import I64, RowParams
from ..rows import RowStates
from ..sampled import Sampled, Scored
from ..top_tokens import top_tokens
from .base import DeviceSampler, SampledRows
from .logprobs import score


class TorchSampler(DeviceSampler):
    """On any device."""

    def __init__(self, device: Device, states: RowStates[Tensor]) -> None:
        self._device = device
        self._states = states
        self._penalties = DevicePenalties(device, states.vocab_size)
        self._edits: tuple[LogitEdit[RowsEdit], ...] = (states.bias, self._penalties, states.early_stop)

    def start(self, inits: Sequence[RowInit]) -> None:
        """Start the device's penalty counts of the rows. The rest of their state is in ``RowStates``."""
        for init in inits:
            self._penalties.start(init)

    def sample(self, logits_SV: Tensor, sampled: SampledRows) -> Sampled[Tensor]:
        """Queue the choice of tokens by torch operations. Logit edits change a copy of the logits.

        Last tokens and penalty counts are updated on the device.
        """
        params = sampled.params
        edits = find_edits(self._edits, sampled.rows, params, sampled.positions)
        if edits:
            logits_SV = logits_SV.clone()
        for edit in edits:
            edit.apply(logits_SV, params, self._device.upload)
        # Not argmax, which leaves open on some devices which of several largest it names.
        best = top_tokens(logits_SV, 1)
        tokens_S, max_S = best.ids[:, 0], best.values[:, 0]
        finite_S = logits_SV.sum(1, dtype=torch.float64).isnan().logical_not_() & max_S.isfinite()
        drawn = np.flatnonzero(~params["greedy"])
        if len(drawn):
            rows = DrawnRows.of(logits_SV, max_S, params, sampled.positions, self._device.upload)
            tokens_S = self._draw(tokens_S, rows, params, drawn)
        for edit in edits:
            edit.count(tokens_S)
        self._states.last_tokens.index_copy_(0, sampled.rows_there, tokens_S)
        return Sampled(tokens_S, finite_S)

    def score(self, logits_NV: Tensor, targets_N: Tensor, most: int) -> Scored[Tensor]:
        """Queue the log-probabilities by torch operations, in chunks of at most ``CHUNK_LOGPROBS`` of them."""
        return score(logits_NV, targets_N, most)

    def _draw(self, tokens_S: Tensor, rows: DrawnRows, params: RowParams, drawn: I64) -> Tensor:
        """Draw tokens at random for some rows, and return ``tokens_S`` with these replaced.

        ``drawn``: indices of these rows among the step's. ``params``: those of all rows of the step. ``rows``: the same
        parameters on the device.
        """
        top_k, top_p, drops_tail = params["top_k"][drawn], params["top_p"][drawn], drop_tails(params)[drawn]
        is_few = (top_k > 0) & (top_k <= CANDIDATES)
        is_whole = (top_k == 0) & (top_p == np.inf)
        for way, members in (("few", is_few), ("whole", is_whole), ("sorted", ~is_few & ~is_whole)):
            which = drawn[members]
            if not len(which):
                continue
            part = rows.take(which, self._device.upload)
            if way == "few":
                chosen = from_top_k(part)
            elif way == "whole":
                chosen = from_all(part, drops_tail=bool(drops_tail[members].any()))
            else:
                chosen = from_sorted(part)
            are_all = len(which) == len(tokens_S)
            tokens_S = chosen if are_all else tokens_S.index_copy(0, self._device.upload(which), chosen)
        return tokens_S
