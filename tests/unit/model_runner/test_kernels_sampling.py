"""The sampling kernel against the torch sampler on vocabularies of real size; test_sampler.py has the rules.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.sampler_reference import BORDER, make_row, reference

from pdserve.model_runner.cpu_engine.build import levels_here
from pdserve.model_runner.cpu_engine.team import Team
from pdserve.model_runner.sampling.inverse_cdf import uniforms
from pdserve.model_runner.sampling.row_params import RowParams
from pdserve.model_runner.sampling.rows import host_rows
from pdserve.model_runner.sampling.rules import sample
from pdserve.runtime.splitmix import _MIX_1, _MIX_2, GOLDEN

pytestmark = pytest.mark.skipif(not levels_here(), reason="this processor can't run the kernels")

ROWS = 16
RULES = [
    {"temperature": 0.0},
    {},
    {"min_p": 0.05},
    {"top_p": 0.9},
    {"top_p": 0.2, "min_p": 0.4},
    {"top_k": 3},
    {"top_k": 64, "top_p": 0.8},
    {"top_k": 1000, "top_p": 0.3},
    {"top_k": 9000},
    {"temperature": 0.7, "top_p": 0.95},
    {"temperature": 5.0, "top_p": 0.999},
]


def make_params(vocab: int, rule: dict) -> RowParams:
    states = host_rows(ROWS, vocab)
    for row in range(ROWS):
        states.start(make_row(row, seed=row * 977, **rule))
    return states.params(np.arange(ROWS))


def draw(logits: torch.Tensor, params: RowParams, positions: np.ndarray, threads: int) -> list[int]:
    from pdserve.model_runner.sampling.native import NativeSampler

    chosen = NativeSampler(Team(threads)).sample(logits.numpy(), params, positions)
    assert chosen.finite.all()
    return chosen.tokens.tolist()


@pytest.mark.sample(3)
@pytest.mark.parametrize("vocab", [17, 4097, 49152, 49155])
@pytest.mark.parametrize("spread", [1.0, 4.0, 12.0])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_draws_the_tokens_of_the_torch_sampler(rule: dict, spread: float, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = torch.from_numpy((rng.standard_normal((ROWS, vocab)) * spread).astype(np.float32))
    params, positions = make_params(vocab, rule), rng.integers(4, 1000, ROWS)
    tokens = draw(logits, params, positions, 1)
    for row, other in enumerate(sample(logits, params, positions).tokens.tolist()):
        # Sums of float32 weights in another order move the borders between tokens, by far less than BORDER.
        if tokens[row] != other:
            init = make_row(row, seed=row * 977, **rule)
            assert reference(logits[row].numpy(), init, int(positions[row])).margin < BORDER
    assert tokens == draw(logits, params, positions, 3)
    # Rows as the engine leaves them: a view of wider memory.
    wide = torch.full((ROWS, vocab + 5), float("nan"))
    wide[:, :vocab] = logits
    assert tokens == draw(wide[:, :vocab], params, positions, 2)


def test_the_uniform_number_is_the_reference_s() -> None:
    """With equal logits the token tells the number, to one part in V."""
    vocab, rng = 1 << 16, np.random.default_rng(1)
    params, positions = make_params(vocab, {}), rng.integers(4, 2**31, ROWS)
    params["seed"] = rng.integers(0, 2**64, ROWS, dtype=np.uint64)
    tokens = draw(torch.zeros(ROWS, vocab), params, positions, 1)
    assert tokens == (uniforms(params["seed"], positions) * vocab).astype(int).tolist()


def unmixed(bits: int) -> int:
    """Return the number that splitmix64 mixes to ``bits``."""
    span = 1 << 64

    def unshifted(bits: int, shift: int) -> int:
        found = bits
        for _ in range(64 // shift):
            found = bits ^ (found >> shift)
        return found

    bits = unshifted(bits, 31) * pow(int(_MIX_2), -1, span) % span
    bits = unshifted(bits, 27) * pow(int(_MIX_1), -1, span) % span
    return unshifted(bits, 30)


@pytest.mark.parametrize("rule", [{}, {"top_k": 5}], ids=str)
def test_weights_below_the_smallest_normal_number_are_zero(rule: dict) -> None:
    """Intel's processors take up to a hundred times as long for them. The uniform number 0 finds the first weight."""
    position = 4
    seed = (unmixed(-(position + 1) * int(GOLDEN) % (1 << 64)) - int(GOLDEN)) % (1 << 64)
    params, positions = make_params(8, rule), np.full(ROWS, position)
    params["seed"] = seed
    assert uniforms(params["seed"], positions).tolist() == [0.0] * ROWS
    # e ** -95 is 5.5e-42.
    logits = torch.full((ROWS, 8), -200.0)
    logits[:, 0], logits[:, 1] = -95.0, 0.0
    assert draw(logits, params, positions, 1) == [1] * ROWS


def test_logits_below_the_smallest_normal_number_keep_their_order() -> None:
    logits = torch.zeros(ROWS, 40)
    logits[:, 20], logits[:, 30] = 1e-41, 2e-41
    params, positions = make_params(40, {"top_k": 2}), np.arange(ROWS) + 4
    assert set(draw(logits, params, positions, 1)) == {20, 30}


def test_rows_must_be_contiguous() -> None:
    params = make_params(8, {})
    with pytest.raises(ValueError, match="one after another"):
        draw(torch.zeros(8, ROWS).T, params, np.zeros(ROWS, dtype=np.int64), 1)
