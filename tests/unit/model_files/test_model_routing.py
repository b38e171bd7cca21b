"""Routing of tokens to experts, compared with transformers' own routers and with the definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from pdserve.model_files.spec import ExpertScoring, ExpertsSpec, GroupScore
from pdserve.model_runner.models.routing import choose_experts

TOKENS = 200


def logits(experts: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(TOKENS, experts, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("groups", "kept", "chosen", "normalised"), [(1, 1, 3, True), (4, 2, 4, True), (3, 1, 2, False)]
)
def test_sigmoids_in_groups_are_chosen_as_deepseek_v3_does(
    groups: int, kept: int, chosen: int, normalised: bool
) -> None:
    config = DeepseekV3Config(
        hidden_size=12,
        moe_intermediate_size=4,
        n_routed_experts=12,
        n_group=groups,
        topk_group=kept,
        num_experts_per_tok=chosen,
        norm_topk_prob=normalised,
        routed_scaling_factor=2.5,
    )
    theirs = DeepseekV3TopkRouter(config)
    bias = torch.randn(12, generator=torch.Generator().manual_seed(1)) / 5
    theirs.weight.data.copy_(torch.eye(12))
    theirs.e_score_correction_bias.copy_(bias)
    _, weights, experts = theirs(logits(12))
    spec = ExpertsSpec(
        count=12,
        chosen=chosen,
        inner=4,
        scoring=ExpertScoring.SIGMOID,
        normalised=normalised,
        weight_scale=2.5,
        choice_bias=True,
        groups=groups,
        groups_chosen=kept,
        group_score=GroupScore.TWO_LARGEST,
    )
    choice = choose_experts(spec, logits(12), bias)
    order, same = experts.argsort(), choice.experts.argsort()
    assert torch.equal(choice.experts.gather(1, same), experts.gather(1, order))
    torch.testing.assert_close(choice.weights.gather(1, same), weights.gather(1, order), rtol=1e-5, atol=1e-7)


def test_groups_by_their_largest() -> None:
    spec = ExpertsSpec(count=6, chosen=2, inner=4, normalised=False, groups=3, groups_chosen=1)
    found = choose_experts(spec, logits(6), None)
    scores = logits(6).softmax(-1)
    for token in range(TOKENS):
        group = int(scores[token].argmax()) // 2
        pair = torch.tensor([2 * group, 2 * group + 1])
        best = pair[scores[token, pair].argsort(descending=True)]
        assert torch.equal(found.experts[token], best)
        assert torch.equal(found.weights[token], scores[token, best])


def test_a_softmax_over_the_chosen_alone_is_the_normalised_one() -> None:
    spec = ExpertsSpec(count=9, chosen=3, inner=4)
    found = choose_experts(spec, logits(9), None)
    best = logits(9).topk(3)
    torch.testing.assert_close(found.weights, best.values.softmax(-1))
    assert torch.equal(found.experts, best.indices)


def test_of_equal_scores_the_first_expert_counts_more() -> None:
    spec = ExpertsSpec(count=5, chosen=2, inner=4)
    assert choose_experts(spec, torch.zeros(3, 5), None).experts.tolist() == [[0, 1]] * 3
    # Also of groups.
    grouped = replace(spec, count=6, groups=3, groups_chosen=2)
    assert choose_experts(grouped, torch.zeros(1, 6), None).experts.tolist() == [[0, 1]]


def test_a_token_s_choice_does_not_depend_on_those_beside_it() -> None:
    spec = ExpertsSpec(count=8, chosen=3, inner=4, groups=4, groups_chosen=2, group_score=GroupScore.TWO_LARGEST)
    together = choose_experts(spec, logits(8), None)
    for token in range(0, TOKENS, 37):
        alone = choose_experts(spec, logits(8)[token : token + 1], None)
        assert torch.equal(alone.experts[0], together.experts[token])
        assert torch.equal(alone.weights[0], together.weights[token])


def test_scores_of_nought_have_weights_of_nought() -> None:
    spec = ExpertsSpec(count=4, chosen=2, inner=4, scoring=ExpertScoring.SIGMOID)
    assert choose_experts(spec, torch.full((1, 4), -300.0), None).weights.tolist() == [[0.0, 0.0]]
