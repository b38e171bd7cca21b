"""Chooses tokens by the rules of ``rules.py`` on a device that computes beside the host, and never waits.

A row's way through the code follows from its parameters alone, which the host knows, and never from its logits. The
next token of a row is penalised before the host knows the one before. So what penalties count lies on the device, too.

Life of a row: ``start`` at its ``RowInit``, behind ``RowStates.start``; then ``sample`` for each of its tokens.

Shapes: S sampled rows, N scored positions, V vocabulary, K alternatives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ....messages.worker import RowInit
from ..row_params import I64, RowParams
from ..rows import NO_TOKEN, RowStates
from ..sampled import Sampled, Scored


class SampledRows(NamedTuple):
    """The rows of a step that sample, each once."""

    rows: I64
    """[S], of the request table."""
    positions: I64
    """[S]: of the tokens to be chosen."""
    params: RowParams
    """[S]"""
    rows_there: Tensor
    """``rows`` on the device."""
    positions_there: Tensor
    """``positions`` on the device."""


class DeviceSampler(ABC):
    """``torch_sampler.py`` and ``triton_sampler.py``; both choose the same tokens but where rounding decides.

    ``reads_halves``: whether logits may be bfloat16 or float16, too.
    """

    reads_halves: ClassVar[bool] = False

    @abstractmethod
    def start(self, inits: Sequence[RowInit]) -> None:
        """Start the device's state of rows that new requests have taken: parameters, penalty counts, edits.

        ``inits``: one for each row. Call ``RowStates.start`` for these rows first.
        """

    @abstractmethod
    def sample(self, logits_SV: Tensor, sampled: SampledRows) -> Sampled[Tensor]:
        """Queue the choice of each row's token, which is stored as its last one and counted for its penalties.

        ``logits_SV``: left as they are. A row that is not ``finite`` gets a token that means nothing. The results stay
        on the device.
        """

    @abstractmethod
    def score(self, logits_NV: Tensor, targets_N: Tensor, most: int) -> Scored[Tensor]:
        """Queue the log-probability of each row's target, and those of its ``most`` likeliest tokens, in float32.

        ``targets_N``: token of each row, int64. If V is less than ``most``, all V tokens are returned.
        """


def device_rows(max_reqs: int, vocab_size: int, device: torch.device) -> RowStates[Tensor]:
    """Make the state of ``max_reqs`` rows that are sampled on ``device``, none of them with a request."""
    return RowStates(vocab_size, torch.full((max_reqs,), NO_TOKEN, dtype=torch.int64, device=device))
