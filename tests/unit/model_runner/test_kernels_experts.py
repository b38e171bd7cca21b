"""Mixtures of experts on the CPU engine, against the same written out in float64, and against themselves.

A token goes through an expert or not. If float64 is all but undecided, another type may choose otherwise. Such tokens
are not compared.

Shapes: T tokens, E experts, C chosen of them.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from support.experts import Experts, Kinds, Weight, any_spec, choose
from support.sampling import few
from torch import Tensor

from pdserve.model_files.spec import (
    Activation,
    ExpertScoring,
    ExpertsSpec,
    GroupScore,
    LayerSpec,
    MLPSpec,
    ModelSpec,
)
from pdserve.model_runner.cpu_engine.build import BuildError
from pdserve.model_runner.cpu_engine.library import ActivationDType, load_library
from pdserve.model_runner.cpu_engine.lowering import refusal
from pdserve.model_runner.cpu_engine.single_kernels import choose_experts
from pdserve.model_runner.cpu_engine.weight_packer import LinearKind
from pdserve.model_runner.loader.quantized_blocks import FORMATS
from tests.unit.model_runner.test_kernels_layers import (
    ATTENTION,
    NORM,
    PASSES,
    Engine,
    Exact,
    LayerTensors,
    Model,
    compute_exactly,
    make_model,
    make_spec,
    run_all,
)
from tests.unit.model_runner.test_kernels_linear import round_activations

try:
    load_library()
except BuildError as error:
    pytest.skip(str(error), allow_module_level=True)

PLAIN = ExpertsSpec(count=7, chosen=2, inner=70)
BLOCKS = ExpertsSpec(count=6, chosen=3, inner=256)
Found = dict[tuple[int, int], Tensor]


def layer(experts: ExpertsSpec | MLPSpec, **changes) -> LayerSpec:
    return replace(LayerSpec(attention=ATTENTION, mlp=experts, before_attention=NORM, before_mlp=NORM), **changes)


SPECS = {
    "plain": PLAIN,
    "one chosen": replace(PLAIN, chosen=1),
    "eight chosen": replace(PLAIN, count=20, chosen=8, inner=34),
    "all chosen": replace(PLAIN, chosen=7),
    "one expert": replace(PLAIN, count=1, chosen=1),
    "many experts": replace(PLAIN, count=130, chosen=4, inner=16),
    "not normalised": replace(PLAIN, normalised=False, weight_scale=1.7),
    "sigmoid in groups": replace(
        PLAIN,
        count=24,
        chosen=4,
        scoring=ExpertScoring.SIGMOID,
        choice_bias=True,
        groups=6,
        groups_chosen=2,
        group_score=GroupScore.TWO_LARGEST,
        weight_scale=2.5,
    ),
    "groups by the largest": replace(PLAIN, count=12, chosen=3, groups=4, groups_chosen=2),
    "limited, with biases": replace(PLAIN, chosen=4, bias=True, limit=0.7, router_bias=True),
    "a shared one": replace(PLAIN, shared=MLPSpec(inner=150, activation=Activation.GELU)),
    "a shared one with a gate": replace(PLAIN, bias=True, shared=MLPSpec(inner=2, bias=True), shared_gate=True),
    "gelu": replace(PLAIN, activation=Activation.GELU_TANH),
} | {f"random {seed}": any_spec(seed) for seed in range(12)}


def two_layers(experts: ExpertsSpec) -> ModelSpec:
    """Make a model of two layers: a usual one, and one with norms after and none before."""
    other = layer(experts, before_mlp=None, after_mlp=NORM, residual_scale=0.6)
    return make_spec(layer(experts), other)


def one_layer(experts: ExpertsSpec, **changes) -> ModelSpec:
    return make_spec(layer(experts), **changes)


MODELS = {name: two_layers(spec) for name, spec in SPECS.items()} | {
    "a network first": make_spec(layer(MLPSpec(inner=70)), layer(PLAIN), layer(MLPSpec(inner=34))),
    "a network last": make_spec(layer(SPECS["a shared one"]), layer(MLPSpec(inner=70))),
    "layers of different sizes": make_spec(layer(PLAIN), layer(SPECS["many experts"]), layer(SPECS["one expert"])),
}


# --- which ones ---


@pytest.mark.parametrize("name", few(SPECS))
def test_the_choice_is_that_of_float64(name: str) -> None:
    spec = SPECS[name]
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(400, spec.count, generator=generator) * 3
    bias = torch.randn(spec.count, generator=generator) * 0.2 if spec.choice_bias else None
    exact = choose(spec, logits.double(), bias)
    experts, weights = choose_experts(spec, logits, bias)
    clear = exact.margin > 1e-6
    assert clear.float().mean() > 0.9
    # The order among those chosen is not what counts.
    assert torch.equal(experts[clear].sort(-1).values, exact.experts[clear].sort(-1).values)
    ours, theirs = (torch.zeros(400, spec.count, dtype=torch.float64) for _ in range(2))
    ours.scatter_(1, experts, weights.double())
    theirs.scatter_(1, exact.experts, exact.weights)
    torch.testing.assert_close(ours[clear], theirs[clear], rtol=2e-6, atol=1e-9)


def test_of_equal_scores_the_first_are_chosen() -> None:
    spec = replace(PLAIN, count=12, chosen=3, groups=4, groups_chosen=2)
    experts, weights = choose_experts(spec, torch.zeros(1, 12), None)
    assert experts.tolist() == [[0, 1, 2]]
    torch.testing.assert_close(weights, torch.full((1, 3), 1 / 3))
    logits = torch.tensor([[0.0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1]])
    assert choose_experts(spec, logits, None)[0].tolist() == [[1, 2, 10]]


@pytest.mark.parametrize("scoring", ExpertScoring)
def test_extreme_logits_choose_all_the_same(scoring: ExpertScoring) -> None:
    """Existing experts are chosen, whatever the logits are."""
    spec = replace(PLAIN, count=20, chosen=3, scoring=scoring, groups=4, groups_chosen=2)
    far = torch.full((1, 20), -300.0)
    far[0, 7] = 300.0
    experts, weights = choose_experts(spec, far, None)
    assert experts[0, 0] == 7
    torch.testing.assert_close(weights, torch.tensor([[1.0, 0.0, 0.0]]))
    for bad in (torch.nan, torch.inf, -torch.inf):
        experts, _ = choose_experts(spec, torch.full((1, 20), bad), None)
        assert ((experts >= 0) & (experts < 20)).all()


@pytest.mark.parametrize("scoring", ExpertScoring)
def test_what_is_chosen_by_no_numbers_counts_for_no_number(scoring: ExpertScoring) -> None:
    """A checkpoint's router may be broken where the token is not: its output must not look like one."""
    logits = torch.zeros(2, 20)
    logits[0, 13] = torch.nan
    _, weights = choose_experts(replace(PLAIN, count=20, chosen=3, scoring=scoring), logits, None)
    assert weights[0].isnan().all()
    assert weights[1].isfinite().all()


# --- whole models ---


def compare(model: Model, engine: Engine, found: Found, least: float, **options) -> tuple[Tensor, Tensor]:
    """Return the logits of tokens with experts chosen by more than ``least``, and the exact ones."""
    exact: Exact = compute_exactly(model, engine, list(found), **options)
    clear = exact.margin > least
    assert clear.float().mean() > 0.4
    return torch.stack(list(found.values())).double()[clear], exact.logits[clear]


def noise(ours: Tensor, exact: Tensor) -> float:
    return float((ours - exact).square().mean() / exact.square().mean())


@pytest.mark.sample(3)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", few(MODELS, 1))
def test_float32_is_float64_but_for_rounding(name: str, threads: int) -> None:
    model = make_model(MODELS[name], torch.float32)
    assert refusal(model.spec, torch.float32, torch.float32) is None
    engine = Engine(model, threads)
    ours, exact = compare(model, engine, run_all(engine, PASSES), 1e-5)
    torch.testing.assert_close(ours, exact, rtol=3e-4, atol=3e-4)


@pytest.mark.sample(2)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", few(SPECS, 1))
def test_bfloat16_is_near(name: str, threads: int) -> None:
    """One layer, so that no token sees what another has chosen."""
    model = make_model(one_layer(SPECS[name]), torch.bfloat16)
    engine = Engine(model, threads)
    assert noise(*compare(model, engine, run_all(engine, PASSES), 0.003)) < 1e-3


def round_to_16_bits(a: Tensor) -> Tensor:
    """Round to 16 bits as the engine does by default."""
    return round_activations(a, ActivationDType.INT16)


KINDS: list[Kinds] = [(kind, kind) for kind in FORMATS]
MIXED: list[Kinds] = [(Kind.Q4_K, Kind.Q6_K), (Kind.Q4_K, Kind.Q5_0), (None, Kind.Q8_0), (Kind.Q8_0, None)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kinds", KINDS + MIXED, ids=str)
def test_quantised_experts_are_their_blocks(kinds: Kinds, dtype: torch.dtype) -> None:
    """Activations are rounded as the products with blocks do it; beyond that, only additions may differ, and what they
    tip when activations are rounded.
    """
    spec = replace(BLOCKS, shared=MLPSpec(inner=512))
    model = make_model(one_layer(spec, hidden_size=256), dtype, kinds)
    engine = Engine(model, 2)
    found = run_all(engine, PASSES)
    least, limit = (1e-4, 3e-6) if dtype == torch.float32 else (0.005, 1e-3)
    assert noise(*compare(model, engine, found, least, rounding=round_to_16_bits)) < limit
    assert noise(*compare(model, engine, found, least)) < limit + 1e-8


@pytest.mark.parametrize("kinds", [(None, None), (Kind.Q8_0, Kind.Q8_0)], ids=str)
@pytest.mark.parametrize("threads", [5, 16])
def test_more_threads_than_a_product_has_panels(threads: int, kinds: Kinds) -> None:
    spec = replace(BLOCKS, inner=32, shared=MLPSpec(inner=64))
    model = make_model(one_layer(spec, hidden_size=64), torch.float32, kinds)
    few, many = Engine(model, 1), Engine(model, threads)
    for entries in PASSES:
        expected = few.run(entries)
        assert all(torch.equal(logits, expected[place]) for place, logits in many.run(entries).items())


def routed(model: Model, bias: Tensor) -> Model:
    """Return the model with a router that chooses by ``bias`` more than by the token."""

    def of_layer(tensors: LayerTensors) -> LayerTensors:
        experts = tensors.experts
        assert isinstance(experts, Experts)
        router = Weight(experts.router.values * 0.01, bias)
        return tensors._replace(experts=experts._replace(router=router))

    return model._replace(layers=[of_layer(tensors) for tensors in model.layers])


@pytest.mark.sample(4)
@pytest.mark.parametrize("kinds", [(None, None), (Kind.Q4_0, Kind.Q8_0)], ids=str)
@pytest.mark.parametrize("bias", [[0, 0, 9, 0, 0, 0], [0, 0, 0, 0, 0, 9.0], [5.0, -9, 4, -9, -9, 3], [0.0] * 6])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_division_of_tokens_among_experts(bias: list[float], kinds: Kinds, threads: int) -> None:
    """All to one, to the last, to a few, to any: prompts of hundreds, and single tokens."""
    spec = replace(BLOCKS, chosen=1 if max(bias) == 9 else 3, inner=64, router_bias=True)
    model = routed(make_model(one_layer(spec, hidden_size=64), torch.float32, kinds), torch.tensor(bias))
    engine = Engine(model, threads)
    ours, exact = compare(model, engine, run_all(engine, PASSES), 1e-6, rounding=round_to_16_bits)
    assert noise(ours, exact) < 3e-6


INVARIANT = {name: (MODELS[name], (None, None)) for name in MODELS} | {
    "blocks": (make_spec(*[layer(BLOCKS)] * 2, hidden_size=256), (Kind.Q4_K, Kind.Q6_K)),
    "blocks and a shared one": (
        make_spec(*[layer(replace(BLOCKS, shared=MLPSpec(inner=512), shared_gate=True))] * 2, hidden_size=256),
        (Kind.Q4_0, Kind.Q8_0),
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", few(INVARIANT, 1))
def test_a_token_depends_on_its_text_alone_to_the_last_bit(name: str, dtype: torch.dtype) -> None:
    """Not on its batch, the number of threads, or how its text is cut."""
    spec, kinds = INVARIANT[name]
    model = make_model(spec, dtype, kinds)
    together = run_all(Engine(model, 2), PASSES)
    alone = run_all(Engine(model, 3), [[entry] for entries in PASSES for entry in entries])
    cuts = [0, 1, 2, 60, 190, 300, 399, 400, 402]
    cut = run_all(Engine(model, 1), [[(3, begin, end - begin)] for begin, end in itertools.pairwise(cuts)])
    for place, logits in together.items():
        assert torch.equal(alone[place], logits), place
        assert place not in cut or torch.equal(cut[place], logits), place


@pytest.mark.parametrize("kinds", [(None, None), (Kind.Q4_0, Kind.Q8_0)], ids=str)
def test_what_is_not_finite_stays_in_its_row(kinds: Kinds) -> None:
    model = make_model(one_layer(replace(BLOCKS, inner=64), hidden_size=64), torch.float32, kinds)
    entries = [(row, 0, 1) for row in range(4)]
    fine = Engine(model, 2).run(entries)
    spoilt = model._replace(embedding=model.embedding.clone())
    bad = Engine(spoilt, 2)
    spoilt.embedding[int(bad.ids(2, torch.tensor([0]))[0]), 5] = torch.nan
    # The head is a copy, made before.
    found = bad.run(entries)
    assert found[2, 0].isnan().all()
    for row in (0, 1, 3):
        assert torch.equal(found[row, 0], fine[row, 0])


# --- what is read ---


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_each_chosen_expert_is_read_once(threads: int) -> None:
    spec = replace(BLOCKS, count=9, chosen=2, inner=64, router_bias=True)
    bias = torch.full((9,), -50.0)
    bias[[1, 4]] = 50.0
    model = routed(make_model(one_layer(spec, hidden_size=64), torch.float32), bias)
    engine = Engine(model, threads)
    for entries in ([(0, 0, 1)], [(0, 0, 6)], [(1, 0, 40), (2, 0, 20)]):
        engine.run(entries)
        read = engine.weight_bytes_read()
        assert read[LinearKind.GATE_UP] == 2 * (2 * 64 * 64 * 4)
        assert read[LinearKind.DOWN] == 2 * (64 * 64 * 4)
    # Tokens of an expert in tiles of up to 96.
    engine.run([(3, 0, 100)])
    assert engine.weight_bytes_read()[LinearKind.DOWN] == 2 * 2 * (64 * 64 * 4)
