"""Experts of one layer against transformers' own, and against sums written out in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from pdserve.model_files.spec import Activation, ExpertScoring, ExpertsSpec, GroupScore, MLPSpec
from pdserve.model_runner.models.experts import Experts
from pdserve.model_runner.ops.torch_ops import TorchOps

HIDDEN, INNER, COUNT, TOKENS = 20, 14, 12, 33
PLAIN = ExpertsSpec(count=COUNT, chosen=3, inner=INNER)
DEEPSEEK_V3 = replace(
    PLAIN,
    scoring=ExpertScoring.SIGMOID,
    weight_scale=2.5,
    choice_bias=True,
    groups=4,
    groups_chosen=2,
    group_score=GroupScore.TWO_LARGEST,
    shared=MLPSpec(inner=10),
)
SPECS = {
    "softmax": PLAIN,
    "not normalised": replace(PLAIN, normalised=False, chosen=1, weight_scale=16.0),
    "all": replace(PLAIN, chosen=COUNT, activation=Activation.GELU_TANH, bias=True),
    "sigmoid": replace(PLAIN, scoring=ExpertScoring.SIGMOID, normalised=False, choice_bias=True),
    "groups by their largest": replace(PLAIN, groups=3, groups_chosen=1, normalised=False, weight_scale=0.5),
    "DeepSeek-V3": DEEPSEEK_V3,
    "shared by a gate": replace(PLAIN, shared=MLPSpec(inner=6, activation=Activation.GELU), shared_gate=True),
    "clamped": replace(PLAIN, limit=0.8, bias=True, router_bias=True),
}


pytestmark = pytest.mark.usefixtures("one_thread")


OPS = TorchOps()


def make_experts(spec: ExpertsSpec, dtype: torch.dtype = torch.float32) -> Experts:
    torch.manual_seed(5)
    experts = Experts(spec, HIDDEN, dtype=dtype, device=torch.device("cpu"))
    for view in experts.weights("layers.0").values():
        view.normal_(0.0, 0.5)
    return experts


def draw(tokens: int = TOKENS) -> Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(6))


def chosen_in_python(spec: ExpertsSpec, scores: list[float], biases: list[float]) -> list[int]:
    """Return one token's experts, best first, by sorting lists."""
    wanted = [score + bias for score, bias in zip(scores, biases, strict=True)]
    size = spec.count // spec.groups
    groups = [wanted[i * size : (i + 1) * size] for i in range(spec.groups)]
    best = 1 if spec.group_score is GroupScore.LARGEST else 2
    ranked = sorted(range(spec.groups), key=lambda g: -sum(sorted(groups[g])[-best:]))[: spec.groups_chosen]
    among = [e for e in range(spec.count) if e // size in ranked]
    return sorted(among, key=lambda e: -wanted[e])[: spec.chosen]


def computed_in_float64(experts: Experts, x: Tensor) -> Tensor:
    """Compute the experts in float64, token by token and expert by expert."""
    spec, weights = experts.spec, {k: v.double() for k, v in experts.weights("x").items()}

    def network(name: str, of: MLPSpec | ExpertsSpec, token: Tensor) -> Tensor:
        def linear(part: str, values: Tensor) -> Tensor:
            return weights[f"x.{name}.{part}.weight"] @ values + weights.get(f"x.{name}.{part}.bias", 0)

        gate, up = linear("gate_proj", token), linear("up_proj", token)
        limit = of.limit if isinstance(of, ExpertsSpec) else None
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            return linear("down_proj", (up + 1) * gate * (1.702 * gate).sigmoid())
        activations = {
            Activation.SILU: nn.functional.silu,
            Activation.GELU: nn.functional.gelu,
            Activation.GELU_TANH: lambda values: nn.functional.gelu(values, approximate="tanh"),
        }
        return linear("down_proj", activations[of.activation](gate) * up)

    rows = []
    for token in x.double():
        logits = weights["x.router.weight"] @ token + weights.get("x.router.bias", 0)
        scores = logits.softmax(-1) if spec.scoring is ExpertScoring.SOFTMAX else logits.sigmoid()
        biases = weights["x.router.choice_bias"].tolist() if spec.choice_bias else [0.0] * spec.count
        chosen = chosen_in_python(spec, scores.tolist(), biases)
        total = sum(scores[chosen]) if spec.normalised else 1
        row = sum(network(f"experts.{e}", spec, token) * scores[e] / total * spec.weight_scale for e in chosen)
        if spec.shared is not None:
            common = network("shared", spec.shared, token)
            row += common * ((weights["x.shared_gate.weight"] @ token).sigmoid() if spec.shared_gate else 1)
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("name", SPECS)
def test_equals_float64(name: str) -> None:
    experts, x = make_experts(SPECS[name]), draw()
    torch.testing.assert_close(experts.forward(x, OPS).double(), computed_in_float64(experts, x), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("name", SPECS)
def test_short_types_choose_in_float32(name: str) -> None:
    """The router is not rounded, so that nothing but products is."""
    experts, x = make_experts(SPECS[name], torch.bfloat16), draw().bfloat16()
    assert experts.router.weight.dtype == torch.float32
    out, expected = experts.forward(x, OPS), computed_in_float64(experts, x)
    assert out.dtype == torch.bfloat16
    assert (out.double() - expected).norm() / expected.norm() < 0.01


def test_a_token_by_itself_is_a_token_among_others() -> None:
    experts, x = make_experts(DEEPSEEK_V3), draw()
    together, alone = experts.forward(x, OPS), torch.cat([experts.forward(row[None], OPS) for row in x])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    # In another order each expert has the same tokens, so that not even rounding differs.
    assert torch.equal(experts.forward(x.flip(0), OPS).flip(0), together)
    assert experts.forward(x[:0], OPS).shape == (0, HIDDEN)


SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_experts_per_tok": 3}
THEIRS = {
    "Mixtral": (MixtralSparseMoeBlock, PLAIN, SIZES | {"num_local_experts": COUNT}),
    "Qwen2Moe": (
        Qwen2MoeSparseMoeBlock,
        replace(PLAIN, normalised=False, shared=MLPSpec(inner=6), shared_gate=True),
        SIZES | {"num_experts": COUNT, "moe_intermediate_size": INNER, "shared_expert_intermediate_size": 6},
    ),
    "DeepseekV3": (
        DeepseekV3MoE,
        replace(DEEPSEEK_V3, shared=MLPSpec(inner=INNER)),
        SIZES
        | {
            "n_routed_experts": COUNT,
            "moe_intermediate_size": INNER,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
    ),
    "GptOss": (
        GptOssMLP,
        replace(PLAIN, limit=0.8, bias=True, router_bias=True),
        SIZES | {"num_local_experts": COUNT, "swiglu_limit": 0.8},
    ),
}
ROUTER = {"gate.weight": "router.weight", "gate.e_score_correction_bias": "router.choice_bias"}


def fill(experts: Experts, state: dict[str, Tensor]) -> None:
    """Fill the weights from the state of transformers' class, without a loader."""
    views = experts.weights("x")
    is_gpt_oss = "router.weight" in state
    for name, values in state.items():
        if name in ("experts.gate_up_proj", "experts.gate_up_proj_bias", "experts.down_proj", "experts.down_proj_bias"):
            kind = "bias" if name.endswith("bias") else "weight"
            stack = values.transpose(1, 2) if is_gpt_oss and kind == "weight" else values
            for e, matrix in enumerate(stack):
                if "down" in name:
                    views.pop(f"x.experts.{e}.down_proj.{kind}").copy_(matrix)
                    continue
                gate, up = (matrix[::2], matrix[1::2]) if is_gpt_oss else matrix.chunk(2)
                views.pop(f"x.experts.{e}.gate_proj.{kind}").copy_(gate)
                views.pop(f"x.experts.{e}.up_proj.{kind}").copy_(up)
        else:
            ours = name.replace("shared_expert_gate", "shared_gate").replace("shared_experts.", "shared.")
            views.pop(f"x.{ROUTER.get(name, ours.replace('shared_expert.', 'shared.'))}").copy_(values)
    assert not views


@pytest.mark.parametrize("name", THEIRS)
def test_equals_transformers(name: str) -> None:
    kind, spec, fields = THEIRS[name]
    torch.manual_seed(4)
    block = kind(getattr(transformers, f"{name}Config")(**fields)).eval()
    state = block.state_dict()
    for tensor in state.values():
        tensor.normal_(0.0, 0.5)
    experts, x = make_experts(spec), draw()
    fill(experts, state)
    with torch.inference_mode():
        out = block(x[None])
    expected = out[0] if isinstance(out, tuple) else out
    torch.testing.assert_close(experts.forward(x, OPS), expected[0], atol=2e-5, rtol=1e-5)


def test_what_one_token_does_not_read() -> None:
    experts = make_experts(PLAIN)
    assert experts.idle_bytes == 3 * HIDDEN * INNER * 4 * (COUNT - 3)
