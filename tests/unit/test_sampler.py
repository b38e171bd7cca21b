"""The sampler against a plain float64 reference, one row at a time, and against itself in other company.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.messages.base import pack_i32
from pdserve.messages.worker import RowInit
from pdserve.model_runner.inverse_cdf import pick, pick_few, uniforms
from pdserve.model_runner.rows import RowStates
from pdserve.model_runner.sampler import CANDIDATES, SORTED, sample
from pdserve.model_runner.top_tokens import top_tokens

BORDER = 1e-5


def make_row(row: int = 0, **changes) -> RowInit:
    defaults = {
        "row": row,
        "seed": 7,
        "prompt_len": 4,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "stop_ids": (),
    }
    return RowInit(**(defaults | changes))


def run(logits: torch.Tensor, inits: list[RowInit], positions: list[int]):
    """Sample each row as the step runner does."""
    states = RowStates(len(inits), logits.shape[1], torch.device("cpu"))
    for init in inits:
        states.start(init)
    rows, at = np.array([init.row for init in inits]), np.array(positions)
    params = states.params(rows)
    return sample(logits, params, at, states.edits(rows, params, at))


class Choice(NamedTuple):
    token: int
    margin: float
    """Distance of the row's uniform number, or of a cut's border, from where the answer changes."""


def reference(logits: np.ndarray, init: RowInit, position: int) -> Choice:
    """What the module docstring of the sampler says, in float64, with full sorts."""
    x = edited_reference(logits.astype(np.float64), init, position)
    order = np.lexsort((np.arange(len(x)), -x))
    if init.temperature == 0 or init.top_k == 1:
        return Choice(int(order[0]), 1.0)
    p = np.exp((x - x.max()) / init.temperature)
    p /= p.sum()
    kept = order[: init.top_k] if init.top_k > 0 else order
    margin = 1.0
    q = p[kept] / p[kept].sum()
    if init.top_p < 1:
        before = np.cumsum(q) - q
        margin = np.abs(before - init.top_p).min()
        kept, q = kept[before < init.top_p], q[before < init.top_p]
    if init.min_p > 0:
        margin = min(margin, np.abs(q / q[0] - init.min_p).min())
        kept = kept[q >= init.min_p * q[0]]
    kept = np.sort(kept)
    cumulative = np.cumsum(p[kept]) / p[kept].sum()
    u = uniforms(np.array([init.seed], dtype=np.uint64), np.array([position]))[0]
    margin = min(margin, np.abs(cumulative[:-1] - u).min(initial=1.0))
    return Choice(int(kept[np.searchsorted(cumulative, u, side="right")]), float(margin))


def edited_reference(x: np.ndarray, init: RowInit, position: int) -> np.ndarray:
    if init.history is not None:
        tokens = np.frombuffer(init.history, dtype="<i4")
        output = tokens[init.prompt_len :]
        for token in set(tokens.tolist()):
            x[token] = x[token] / init.repetition_penalty if x[token] > 0 else x[token] * init.repetition_penalty
        for token in set(output.tolist()):
            x[token] -= init.frequency_penalty * (output == token).sum() + init.presence_penalty
    if position - init.prompt_len < init.min_new_tokens:
        x[[t for t in init.stop_ids if t < len(x)]] = -np.inf
    return x


@st.composite
def rows_and_logits(draw):
    """A few rows with all kinds of parameters; logits spread or peaked, on a coarse grid (so with ties) or not."""
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
                stop_ids=(int(np.argmax(x)), 3, 10**6),
            )
        )
    positions = [init.prompt_len + draw(st.integers(0, 8)) for init in inits]
    return np.array(logits, dtype=np.float32), inits, positions


@given(rows_and_logits())
@settings(max_examples=150, deadline=None)
def test_a_row_gets_the_reference_s_token_and_the_same_alone_as_in_any_company(case) -> None:
    logits, inits, positions = case
    together = run(torch.from_numpy(logits), inits, positions)
    assert together.finite.all()
    for i, init in enumerate(inits):
        alone = run(torch.from_numpy(logits[i : i + 1].copy()), [changed(init, row=0)], positions[i : i + 1])
        assert alone.tokens[0] == together.tokens[i]
        expected = reference(logits[i], init, positions[i])
        if expected.margin > BORDER:
            assert together.tokens[i] == expected.token


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
def test_what_is_kept_of_a_flat_distribution(changes: dict) -> None:
    """More is kept than the candidates, or even the sorted part, hold."""
    count, vocab = 24, 2 * SORTED + 77
    logits = np.random.default_rng(0).standard_normal((count, vocab)).astype(np.float32) * 0.5
    inits = [make_row(row, seed=row, **changes) for row in range(count)]
    tokens = run(torch.from_numpy(logits), inits, [4] * count).tokens.tolist()
    expected = [reference(row, init, 4) for row, init in zip(logits, inits, strict=True)]
    certain = [i for i, choice in enumerate(expected) if choice.margin > BORDER]
    assert len(certain) > count / 3
    assert [tokens[i] for i in certain] == [expected[i].token for i in certain]


def test_repetition_makes_seen_tokens_less_likely_whatever_their_sign() -> None:
    history = pack_i32([0, 0, 0, 0])
    for logits in ([-1.0, -1.5, -9.0], [1.5, 1.0, -9.0]):
        penalised = make_row(temperature=0.0, repetition_penalty=2.0, history=history)
        assert run(torch.tensor([logits]), [penalised], [4]).tokens.tolist() == [1]


def changed(init: RowInit, **changes) -> RowInit:
    return RowInit(**({name: getattr(init, name) for name in init.__struct_fields__} | changes))


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


def test_draws_follow_the_distribution() -> None:
    count = 20_000
    logits = torch.tensor([2.0, 0.0, 1.0, -50.0]).log_softmax(0).expand(count, -1).contiguous()
    drawn = run(logits, [make_row(row, seed=row) for row in range(count)], [4] * count).tokens
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
@settings(max_examples=60, deadline=None)
def test_top_tokens_order_by_logit_then_id(seed: int, vocab: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    # A coarse grid around zero: nearly every border is a tie, and both zeros occur.
    logits = (np.round(rng.standard_normal((3, vocab)) * 2) * rng.choice([-0.5, 0.5], (3, vocab))).astype(np.float32)
    best = top_tokens(torch.from_numpy(logits), k)
    for row, values, ids in zip(logits, best.values, best.ids, strict=True):
        expected = np.lexsort((np.arange(vocab), -row))[:k]
        assert ids.tolist() == expected.tolist()
        assert values.tolist() == row[expected].tolist()


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0], [5.0, 5.0, 5.0]])
    assert run(logits, [make_row(0, temperature=0.0), make_row(1, top_k=1)], [4, 4]).tokens.tolist() == [1, 0]


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.9}, {"top_k": 100}])
def test_a_row_that_is_not_finite_is_named_and_leaves_the_others_alone(bad: float, changes: dict) -> None:
    logits = torch.randn(3, 4000, generator=torch.Generator().manual_seed(0))
    inits = [make_row(row, seed=row, **changes) for row in range(3)]
    clean = run(logits, inits, [4, 5, 6])
    logits[1, 3999] = bad
    broken = run(logits, inits, [4, 5, 6])
    assert broken.finite.tolist() == [True, False, True]
    assert broken.tokens[[0, 2]].tolist() == clean.tokens[[0, 2]].tolist()


def test_a_row_without_any_token_left_is_not_finite() -> None:
    init = make_row(min_new_tokens=2, stop_ids=(0, 1, 2))
    assert run(torch.zeros(1, 3), [init], [4]).finite.tolist() == [False]
    assert run(torch.zeros(1, 3), [init], [6]).finite.tolist() == [True]


def test_the_model_s_logits_are_left_as_they_are() -> None:
    logits = torch.randn(2, 3000, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    history = pack_i32([1, 2, 3, 4, 5])
    run(
        logits,
        [
            make_row(0, repetition_penalty=1.5, history=history),
            make_row(1, min_new_tokens=3, stop_ids=(0,), top_p=0.99),
        ],
        [5, 5],
    )
    assert torch.equal(logits, before)
