"""Choice of the experts of a token, and of their weights: functions of the router's logits alone.

Shapes: T tokens, E experts, C chosen ones, G groups of experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...model_files.spec import ExpertScoring, ExpertsSpec, GroupScore

LEAST_TOTAL = 1e-20
"""So that scores that are all nought have weights of nought."""


class ExpertChoice(NamedTuple):
    """Choice of each token: ``experts`` int64 [T, C], best first, and ``weights`` float32 [T, C] of their results."""

    experts: Tensor
    weights: Tensor


def choose_experts(spec: ExpertsSpec, logits_TE: Tensor, choice_bias_E: Tensor | None) -> ExpertChoice:
    """Choose each token's experts by the router's logits (float32), and return them with their weights.

    ``choice_bias_E`` is added to scores for the choice alone, or None.
    Weights come from the unbiased scores.
    Of experts with equal scores, the one with the lower index is chosen first.
    """
    scores = logits_TE.softmax(-1) if spec.scoring is ExpertScoring.SOFTMAX else logits_TE.sigmoid()
    wanted = scores if choice_bias_E is None else scores + choice_bias_E
    if spec.groups > 1:
        wanted = _within_groups(spec, wanted)
    # Sorted and not by topk, which leaves open which of equal ones it takes.
    experts = wanted.sort(dim=-1, descending=True, stable=True).indices[:, : spec.chosen]
    weights = scores.gather(-1, experts)
    if spec.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + LEAST_TOTAL)
    return ExpertChoice(experts, weights * spec.weight_scale)


def _within_groups(spec: ExpertsSpec, wanted_TE: Tensor) -> Tensor:
    """Return the scores with those outside of each token's best groups of experts set to -inf."""
    by_group_TGE = wanted_TE.view(-1, spec.groups, spec.count // spec.groups)
    best = 1 if spec.group_score is GroupScore.LARGEST else 2
    of_group_TG = by_group_TGE.topk(best, -1).values.sum(-1)
    chosen = of_group_TG.sort(dim=-1, descending=True, stable=True).indices[:, : spec.groups_chosen]
    is_out_TG = torch.ones_like(of_group_TG, dtype=torch.bool).scatter_(-1, chosen, False)
    return by_group_TGE.masked_fill(is_out_TG[..., None], float("-inf")).view(wanted_TE.shape)
