"""The sampler against a plain float64 reference, one row at a time, and against itself in other company.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from support.examples import examples
from support.sampler_reference import BORDER, make_row, reference

from pdserve.messages.base import pack_i32
from pdserve.messages.worker import RowInit
from pdserve.model_runner.cpu_engine.build import levels_here
from pdserve.model_runner.sampling.choose_tokens import choose_tokens
from pdserve.model_runner.sampling.draws import DrawnRows, from_sorted
from pdserve.model_runner.sampling.inverse_cdf import pick, pick_few, uniforms
from pdserve.model_runner.sampling.rows import host_rows
from pdserve.model_runner.sampling.rules import CANDIDATES, SORTED, TorchRules
from pdserve.model_runner.sampling.sampled import Sampled
from pdserve.model_runner.sampling.top_ids import top_ids
from pdserve.model_runner.sampling.top_tokens import top_tokens

# Every rule is tested twice: as torch operations, and as the CPU kernel.
WAYS = ["torch", "kernel"] if levels_here() else ["torch"]
both_ways = pytest.mark.parametrize("way", WAYS)


BIASES = st.dictionaries(
    st.sampled_from([0, 1, 2, 3, 4, 10**6]), st.sampled_from([-100.0, -2.5, 1.5, 4.0, 100.0]), max_size=3
)


@cache
def load_kernel():
    from pdserve.model_runner.sampling.native import NativeSampler

    return NativeSampler()


def run(way: str, logits: torch.Tensor, inits: list[RowInit], positions: list[int]):
    """Sample each row as the step runner does."""
    states = host_rows(len(inits), logits.shape[1])
    for init in inits:
        states.start(init)
    rows, at = np.array([init.row for init in inits]), np.array(positions)
    sampler = load_kernel() if way == "kernel" else TorchRules()
    chosen = choose_tokens(logits.numpy(), states, rows, states.params(rows), at, sampler)
    return Sampled(*map(torch.from_numpy, chosen))


@st.composite
def rows_and_logits(draw):
    """Draw a few rows with all kinds of parameters.

    Logits are spread or peaked, on a coarse grid (so with ties) or not.
    """
    vocab = draw(st.sampled_from([5, 100, 1000, 5000]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    inits, logits = [], []
    for row in range(draw(st.integers(1, 6))):
        x = rng.standard_normal(vocab) * draw(st.sampled_from([0.3, 3.0, 12.0]))
        logits.append(np.round(x * 4) / 4 if draw(st.booleans()) else x)
        prompt_len, outputs = draw(st.integers(1, 8)), draw(st.integers(0, 8))
        penalised = draw(st.booleans())
        inits.append(
            make_row(
                row,
                seed=draw(st.integers(0, 2**64 - 1)),
                prompt_len=prompt_len,
                temperature=draw(st.sampled_from([0.0, 0.01, 0.7, 1.0, 3.0])),
                top_p=draw(st.sampled_from([1.0, 1.0, 0.01, 0.5, 0.9, 0.99])),
                top_k=draw(st.sampled_from([-1, -1, 1, 2, 40, CANDIDATES, CANDIDATES + 1, SORTED + 5, 10**9])),
                min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 0.5])),
                frequency_penalty=draw(st.sampled_from([0.0, 0.5, -1.0])) if penalised else 0.0,
                presence_penalty=draw(st.sampled_from([0.0, 1.5])) if penalised else 0.0,
                repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.8])) if penalised else 1.0,
                history=pack_i32(rng.integers(0, min(vocab, 20), prompt_len + outputs)) if penalised else None,
                min_new_tokens=draw(st.sampled_from([0, 4])),
                logit_bias=draw(BIASES),
                stop_ids=(int(np.argmax(x)), 3, 10**6),
            )
        )
    positions = [init.prompt_len + draw(st.integers(0, 8)) for init in inits]
    return np.array(logits, dtype=np.float32), inits, positions


@both_ways
@given(rows_and_logits())
@settings(max_examples=examples(150), deadline=None)
def test_a_row_gets_the_reference_s_token_and_the_same_alone_as_in_any_company(way: str, case) -> None:
    logits, inits, positions = case
    together = run(way, torch.from_numpy(logits), inits, positions)
    assert together.finite.all()
    for i, init in enumerate(inits):
        alone = run(
            way, torch.from_numpy(logits[i : i + 1].copy()), [structs.replace(init, row=0)], positions[i : i + 1]
        )
        assert alone.tokens[0] == together.tokens[i]
        expected = reference(logits[i], init, positions[i])
        if expected.margin > BORDER:
            assert together.tokens[i] == expected.token


@both_ways
@pytest.mark.parametrize(
    "changes",
    [
        {"top_p": 0.9},
        {"top_p": 0.2, "min_p": 0.4},
        {"top_k": 100, "top_p": 0.3},
        {"top_k": SORTED + 500},
        {"top_k": SORTED + 500, "top_p": 0.95, "min_p": 0.2},
        {"top_k": 50, "top_p": 0.5, "min_p": 0.6},
    ],
)
def test_what_is_kept_of_a_flat_distribution(way: str, changes: dict) -> None:
    """More is kept than the candidates, or even the sorted part, hold."""
    count, vocab = 24, 2 * SORTED + 77
    logits = np.random.default_rng(0).standard_normal((count, vocab)).astype(np.float32) * 0.5
    inits = [make_row(row, seed=row, **changes) for row in range(count)]
    tokens = run(way, torch.from_numpy(logits), inits, [4] * count).tokens.tolist()
    expected = [reference(row, init, 4) for row, init in zip(logits, inits, strict=True)]
    certain = [i for i, choice in enumerate(expected) if choice.margin > BORDER]
    assert len(certain) > count / 3
    assert [tokens[i] for i in certain] == [expected[i].token for i in certain]


@pytest.mark.parametrize("changes", [{"top_p": 0.5}, {"top_k": 100}, {"top_k": 150, "top_p": 0.7}])
def test_a_cut_between_equal_weights_goes_by_logits(changes: dict) -> None:
    """At this temperature 200 logits make some 20 different weights. Every sampler keeps the same tokens."""
    count, vocab = 256, 200
    order = np.random.default_rng(0).permutation(vocab)
    logits = torch.from_numpy((order * 1e-6).astype(np.float32)).expand(count, vocab).contiguous()
    assert len(torch.softmax(logits[0] / 100, 0).unique()) < 50
    inits = [make_row(row, seed=row, temperature=100.0, **changes) for row in range(count)]
    chosen = {way: run(way, logits, inits, [4] * count).tokens for way in WAYS}
    states = host_rows(count, vocab)
    for init in inits:
        states.start(init)
    rows = DrawnRows.of(logits, logits.amax(1), states.params(np.arange(count)), np.full(count, 4))
    chosen["device"] = from_sorted(rows)
    kept = set(np.argsort(-order)[:106].tolist())
    for way, tokens in chosen.items():
        assert set(tokens.tolist()) <= kept, way
        assert tokens.tolist() == chosen["torch"].tolist(), way


@both_ways
def test_repetition_makes_seen_tokens_less_likely_whatever_their_sign(way: str) -> None:
    history = pack_i32([0, 0, 0, 0])
    for logits in ([-1.0, -1.5, -9.0], [1.5, 1.0, -9.0]):
        penalised = make_row(temperature=0.0, repetition_penalty=2.0, history=history)
        assert run(way, torch.tensor([logits]), [penalised], [4]).tokens.tolist() == [1]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("vocab", [49152, 49155])
def test_a_large_batch_is_bitwise_its_rows(vocab: int, threads: int) -> None:
    """Real vocabulary sizes, where torch splits work between threads and vector bodies from their tails."""
    was = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(0)) * 3
        weights = torch.softmax(logits, 1)
        u = torch.rand(9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        sums = weights[:, :49152].view(9, -1, 256).sum(2)
        for i in range(9):
            row = slice(i, i + 1)
            assert torch.equal(torch.softmax(logits[row].clone(), 1), weights[row])
            assert torch.equal(weights[row, :49152].clone().view(1, -1, 256).sum(2), sums[row])
            assert torch.equal(pick(weights[row].clone(), u[row]), pick(weights, u)[row])
    finally:
        torch.set_num_threads(was)


@both_ways
def test_draws_follow_the_distribution(way: str) -> None:
    count = 20_000
    logits = torch.tensor([2.0, 0.0, 1.0, -50.0]).log_softmax(0).expand(count, -1).contiguous()
    drawn = run(way, logits, [make_row(row, seed=row) for row in range(count)], [4] * count).tokens
    share = torch.bincount(drawn, minlength=4) / count
    # Five standard deviations of a share of 20,000 draws.
    torch.testing.assert_close(share, logits[0].exp(), atol=5 * 0.5 / count**0.5, rtol=0)


def test_uniform_numbers_are_the_documented_hash_and_even_over_seeds_and_positions() -> None:
    first = uniforms(np.array([0], dtype=np.uint64), np.array([0]))[0]
    assert first == splitmix_reference(0, 0) / 2**53
    seeds, positions = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(200))
    u = uniforms(seeds.ravel(), positions.ravel())
    assert len(np.unique(u)) == len(u)
    assert 0 <= u.min() <= u.max() < 1
    shares = np.histogram(u, bins=20, range=(0, 1))[0] / len(u)
    assert np.abs(shares - 0.05).max() < 0.006
    grid = u.reshape(200, 200)
    for neighbour in (grid[:, 1:], grid[1:, :]):
        here = grid[: neighbour.shape[0], : neighbour.shape[1]]
        assert abs(np.corrcoef(here.ravel(), neighbour.ravel())[0, 1]) < 0.03


def splitmix_reference(seed: int, position: int) -> int:
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    return mix((mix((seed + golden) & mask) + (position + 1) * golden) & mask) >> 11


def test_pick_never_takes_a_weight_of_zero() -> None:
    weights = torch.zeros(3, 700)
    weights[:, 300] = 1.0
    for u in (0.0, 0.5, 1 - 2.0**-53):
        at = torch.full((3,), u, dtype=torch.float64)
        assert pick(weights, at).tolist() == [300] * 3
        assert pick_few(weights, at).tolist() == [300] * 3


def test_pick_takes_the_last_weight_where_rounding_puts_the_target_behind_it() -> None:
    weights = torch.zeros(1, 512)
    # The block's float32 sum rounds up, past what the float64 sum inside the block reaches.
    weights[0, :2] = torch.tensor([1.0, 8e-8])
    assert pick(weights, torch.tensor([1 - 2.0**-53], dtype=torch.float64)).tolist() == [1]


@given(st.integers(0, 2**32), st.sampled_from([40, 3000, 3007]), st.sampled_from([1, 7, 20, 64]))
@settings(max_examples=examples(60), deadline=None)
def test_top_tokens_order_by_logit_then_id(seed: int, vocab: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    # A coarse grid around zero: nearly every border is a tie, and both zeros occur.
    logits = (np.round(rng.standard_normal((3, vocab)) * 2) * rng.choice([-0.5, 0.5], (3, vocab))).astype(np.float32)
    best = top_tokens(torch.from_numpy(logits), k)
    for row, values, ids in zip(logits, best.values, best.ids, strict=True):
        expected = np.lexsort((np.arange(vocab), -row))[:k]
        assert ids.tolist() == expected.tolist()
        assert values.tolist() == row[expected].tolist()
        assert top_ids(row, k).tolist() == expected.tolist()


@both_ways
def test_greedy_takes_the_lowest_of_equals(way: str) -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0], [5.0, 5.0, 5.0]])
    assert run(way, logits, [make_row(0, temperature=0.0), make_row(1, top_k=1)], [4, 4]).tokens.tolist() == [1, 0]


@both_ways
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.9}, {"top_k": 100}])
def test_a_row_that_is_not_finite_is_named_and_leaves_the_others_alone(way: str, bad: float, changes: dict) -> None:
    logits = torch.randn(3, 4000, generator=torch.Generator().manual_seed(0))
    inits = [make_row(row, seed=row, **changes) for row in range(3)]
    clean = run(way, logits, inits, [4, 5, 6])
    logits[1, 3999] = bad
    broken = run(way, logits, inits, [4, 5, 6])
    assert broken.finite.tolist() == [True, False, True]
    assert broken.tokens[[0, 2]].tolist() == clean.tokens[[0, 2]].tolist()


@both_ways
def test_a_row_without_any_token_left_is_not_finite(way: str) -> None:
    init = make_row(min_new_tokens=2, stop_ids=(0, 1, 2))
    assert run(way, torch.zeros(1, 3), [init], [4]).finite.tolist() == [False]
    assert run(way, torch.zeros(1, 3), [init], [6]).finite.tolist() == [True]


@both_ways
def test_the_model_s_logits_are_left_as_they_are(way: str) -> None:
    logits = torch.randn(2, 3000, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    history = pack_i32([1, 2, 3, 4, 5])
    run(
        way,
        logits,
        [
            make_row(0, repetition_penalty=1.5, history=history),
            make_row(1, min_new_tokens=3, stop_ids=(0,), top_p=0.99),
        ],
        [5, 5],
    )
    assert torch.equal(logits, before)
