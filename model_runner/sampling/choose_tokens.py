"""Chooses tokens on the host: the rows' edits, and then a sampler.

Shapes: S sampled rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any

from .logit_edits.base import edited
from .row_params import F32, I64, RowParams
from .rows import RowStates
from .sampled import HostArray, HostSampler, Sampled


def choose_tokens(
    logits_SV: F32, states: RowStates[Any], rows: I64, params: RowParams, positions: I64, sampler: HostSampler
) -> Sampled[HostArray]:
    """Choose the token at ``positions[i]`` of each of ``rows`` by ``sampler``, after the logit edits of its request.

    ``rows``: rows of the request table. ``params`` [S]: sampling parameters of each. ``logits_SV`` is edited in place.
    Afterwards, rows with log-probabilities have their old logits again; others may keep edited ones.
    """
    with edited(logits_SV, params, states.edits(rows, params, positions)):
        return sampler.sample(logits_SV, params, positions)
