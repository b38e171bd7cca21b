"""The cost model of a step: monotone whatever it is told, right about machines of both bounds, quick to follow them."""

from __future__ import annotations

import random
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.sim import make_options, make_worker_ready
from support.sim_machine import Machine, Noise

from pdserve.messages.worker import MeasuredStep
from pdserve.scheduler.estimates.cost_model import KNOTS, CostModel, StepShape, make_cost_model
from pdserve.scheduler.estimates.non_negative import solve_non_negative

PIECES = (4, 16, 27, 40, 64, 100, 128, 300, 512)
BATCHES = (0, 1, 4, 8, 16, 64)

counts = st.tuples(st.integers(0, 300), st.integers(0, 100_000), st.integers(0, 4096), st.floats(0, 1e7))
shapes = counts.map(lambda c: StepShape(*c)).filter(lambda s: s.tokens > 0)
machines = st.builds(
    lambda knee, token_ms, **rates: Machine(read_ms=knee * token_ms, token_ms=token_ms, **rates),
    knee=st.floats(4, 60),
    token_ms=st.floats(0.02, 4),
    kv_token_ms=st.floats(1e-4, 2e-3),
    pair_ms=st.floats(1e-7, 3e-5),
    decode_ms=st.floats(0, 0.2),
    jump_at=st.just(48),
    jump_ms=st.floats(0, 20),
)


def random_shape(rng: random.Random) -> StepShape:
    decodes = rng.choice(BATCHES)
    shape = StepShape(decodes, sum(rng.randrange(20, 1000) for _ in range(decodes)))
    if not decodes or rng.random() < 0.5:
        shape = shape.with_piece(rng.randrange(3000), rng.choice(PIECES))
    return shape


def teach(model: CostModel, curve: Machine, steps: int, seed: int, *, slower: float = 1.0) -> None:
    rng, noise = random.Random(seed), Noise(0.05, 0.02, random.Random(seed + 1))
    for _ in range(steps):
        shape = random_shape(rng)
        model.learn(shape, noise(slower * curve(shape)), model.estimate(shape))
        model.catch_up()


def median_error(model: CostModel, curve: Machine, *, slower: float = 1.0) -> float:
    rng = random.Random(99)
    tried = [random_shape(rng) for _ in range(200)]
    return statistics.median(abs(model.estimate(s) / (slower * curve(s)) - 1) for s in tried)


@settings(max_examples=examples(40), deadline=None)
@given(
    steps=st.lists(st.tuples(shapes, st.floats(0, 1e5)), max_size=40),
    at=shapes,
    more=counts,
    measured=st.lists(st.tuples(shapes, st.floats(0, 1e4)), max_size=4),
)
def test_estimates_are_monotone_and_never_negative_whatever_was_seen(steps, at, more, measured) -> None:
    model = CostModel([MeasuredStep(*shape, forward_ms=ms) for shape, ms in measured], kv_ms=1e-3)
    for shape, ms in steps:
        model.learn(shape, ms, model.estimate(shape))
        model.catch_up()
    before = model.estimate(at)
    assert before > 0
    for i, amount in enumerate(more):
        grown = list(at)
        grown[i] += amount
        assert model.estimate(StepShape(*grown)) >= before * (1 - 1e-9)


@settings(max_examples=examples(25), deadline=None)
@given(curve=machines, seed=st.integers(0, 2**16))
def test_a_machine_is_known_after_some_hundreds_of_steps(curve: Machine, seed: int) -> None:
    model = CostModel()
    teach(model, curve, 400, seed)
    assert median_error(model, curve) < 0.1
    assert model.info()["median_error"] < 0.15


@settings(max_examples=15, deadline=None)
@given(curve=machines, seed=st.integers(0, 2**16), slower=st.sampled_from([0.5, 2.0]))
def test_a_machine_that_changes_its_speed_is_followed(curve: Machine, seed: int, slower: float) -> None:
    model = CostModel()
    teach(model, curve, 300, seed)
    teach(model, curve, 200, seed + 7, slower=slower)
    assert median_error(model, curve, slower=slower) < 0.1


def test_what_prompts_cost_is_not_forgotten_over_decodes_alone() -> None:
    curve = Machine(read_ms=13, token_ms=1.0, pair_ms=1e-5)
    model = CostModel()
    teach(model, curve, 300, 1)
    alone = StepShape(1, 500)
    for _ in range(5000):
        model.learn(alone, curve(alone), model.estimate(alone))
        model.catch_up()
    piece = StepShape(1, 500).with_piece(1000, 128)
    assert model.estimate(piece) == pytest.approx(curve(piece), rel=0.1)


def test_outliers_do_not_move_an_estimate() -> None:
    model, shape = CostModel(), StepShape(8, 2000)
    for i in range(500):
        model.learn(shape, 60.0 if i % 10 == 7 else 20.0, model.estimate(shape))
        model.catch_up()
    assert model.estimate(shape) == pytest.approx(20.0, rel=0.02)


def test_the_fit_waits_until_it_is_called_for() -> None:
    model, shape = CostModel(), StepShape(8, 2000)
    for _ in range(100):
        model.learn(shape, 20.0, model.estimate(shape))
        model.catch_up()
    for _ in range(20):
        model.learn(shape, 30.0, model.estimate(shape))
    assert model.estimate(shape) == pytest.approx(20.0, rel=0.01)
    model.catch_up()
    assert model.estimate(shape) > 21
    # But not for ever: what is not in the model yet takes memory.
    for _ in range(100):
        model.learn(shape, 60.0, model.estimate(shape))
    assert model.estimate(shape) > 35


def test_what_was_never_seen_is_not_taken_for_cheap() -> None:
    curve = Machine(read_ms=13, token_ms=1.0)
    model = CostModel()
    for _ in range(100):
        for shape in (StepShape(1), StepShape(8)):
            model.learn(shape, curve(shape), model.estimate(shape))
            model.catch_up()
    for tokens in (16, 48, 128, 512, 2048):
        shape = StepShape(8).with_piece(0, tokens)
        assert model.estimate(shape) >= curve(shape)


def test_measured_steps_are_enough_for_the_first_estimates() -> None:
    curve = Machine(read_ms=13, token_ms=1.0, pair_ms=1e-5, decode_ms=0.1)
    seen = [StepShape(1, 64), StepShape(8, 512)]
    seen += [StepShape().with_piece(*p) for p in ((0, 16), (0, 48), (0, 64), (0, 128), (384, 128), (0, 512))]
    ready = make_worker_ready(make_options(), measured=[MeasuredStep(*s, forward_ms=curve(s)) for s in seen])
    ready.step_weight_bytes = 13_000_000
    model = make_cost_model(ready)
    for shape in (*seen, StepShape(4, 256), StepShape(8).with_piece(200, 32), StepShape(8).with_piece(0, 300)):
        assert model.estimate(shape) == pytest.approx(curve(shape), rel=0.25)
    # 8 bytes a token, 13 MB in 13 ms: a million of them take 8 ms, until steps say otherwise.
    million = StepShape(1, 1_000_000)
    assert model.estimate(million) - model.estimate(StepShape(1)) == pytest.approx(8.0, rel=0.1)


@settings(max_examples=examples(30), deadline=None)
@given(curve=machines, start=st.integers(0, 3000), most=st.integers(0, 600), share=st.floats(0.5, 4))
def test_tokens_within_is_the_longest_piece_that_keeps_the_limit(curve, start: int, most: int, share: float) -> None:
    model = CostModel()
    teach(model, curve, 60, 3)
    decodes = StepShape(8, 2000)
    limit = share * model.estimate(decodes)
    fits = model.tokens_within(limit, decodes, start, most)
    slow = [n for n in range(1, most + 1) if model.estimate(decodes.with_piece(start, n)) <= limit]
    assert fits == max(slow, default=0)


def test_the_same_outcomes_give_the_same_model() -> None:
    infos = []
    for _ in range(2):
        model = CostModel()
        teach(model, Machine(read_ms=13, token_ms=1.0), 100, 5)
        infos.append(model.info())
    assert infos[0] == infos[1]
    assert list(infos[0]["ms_at_tokens"]) == [str(k) for k in KNOTS]


def test_overhead_follows_slowly_and_robustly() -> None:
    model = CostModel()
    for i in range(400):
        model.learn_overhead(500.0 if i % 50 == 7 else 0.3)
    assert model.overhead_ms == pytest.approx(0.3, rel=0.15)


@settings(max_examples=examples(50), deadline=None)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 8))
def test_non_negative_least_squares_meets_its_conditions(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(size + 5, size))
    a, b = rows.T @ rows + 1e-3 * np.eye(size), rng.normal(size=size)
    w = solve_non_negative(a, b, rng.normal(size=size))
    pull = b - a @ w
    assert (w >= 0).all()
    assert (np.abs(pull[w > 0]) < 1e-6).all()
    assert (pull[w == 0] < 1e-6).all()


def test_a_step_that_was_measured_as_0_ms_is_no_error() -> None:
    """The worker's clock may be too coarse for a small step of a small model."""
    worker = make_worker_ready(make_options(), measured=[MeasuredStep(1, 10, 0, 0.0, 0.0)])
    worker.step_weight_bytes = 10**9
    assert 0 < make_cost_model(worker).estimate(StepShape(1, 10)) < 1
