"""The device's sampler against the host's, and against itself in other company and divided otherwise.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.device_rows import Batch, begin_rows, draw, host_draw, random_batch
from support.sampler_reference import BORDER, make_row, reference
from support.triton_device import DEVICE, there

from pdserve.messages.base import pack_i32
from pdserve.model_runner.sampling.device.logprobs import score
from pdserve.model_runner.sampling.inverse_cdf import uniforms
from pdserve.model_runner.sampling.logprobs import listed as listed_scores
from pdserve.model_runner.sampling.triton.row_table import ONE_OUTPUT, make_table
from pdserve.model_runner.sampling.triton.sampling import make_work, sample
from pdserve.model_runner.sampling.triton.token_logprobs import make_logprob_work, token_logprobs


def check_against_host(seed: int, rows: int, vocab: int) -> None:
    batch = random_batch(seed, rows, vocab)
    table, states = begin_rows(batch.inits, vocab)
    before = table.counts.clone()
    tokens, finite = draw(batch, table)
    host = host_draw(batch, states)
    assert finite == host.finite.tolist()
    assert table.last_tokens.tolist() == tokens
    for row, init in enumerate(batch.inits):
        if finite[row] and tokens[row] != host.tokens[row]:
            # Float32 weights are added in another order there: borders move, by far less than BORDER.
            assert reference(batch.logits[row].numpy(), init, int(batch.positions[row])).margin < BORDER, init
    grown = (table.counts - before).cpu()
    for row, init in enumerate(batch.inits):
        is_edited = bool(init.history or init.sampling.logit_bias or init.stop_ids)
        assert grown[rows - 1 - row].sum() == (ONE_OUTPUT.value if is_edited else 0)
        assert grown[rows - 1 - row][tokens[row]] == (ONE_OUTPUT.value if is_edited else 0)


@pytest.mark.parametrize(("seed", "vocab"), [(0, 5), (1, 100), (2, 3000)])
def test_draws_the_tokens_of_the_host_s_sampler(seed: int, vocab: int) -> None:
    check_against_host(seed, 6, vocab)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("vocab", [5, 100, 1000, 3000])
def test_draws_the_tokens_of_the_host_s_sampler_over_many_rows(vocab: int) -> None:
    for seed in range(20):
        check_against_host(1000 + seed, 16, vocab)


RULES = [
    {"top_k": 40},
    {"top_p": 0.8, "min_p": 0.3},
    {"top_k": 65, "top_p": 0.5},
    {"min_p": 0.3},
    {"top_k": 30, "min_p": 0.4, "temperature": 3.0},
]


@pytest.mark.parametrize("is_coarse", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_token_depends_on_its_row_alone_however_the_row_is_divided(is_coarse: bool) -> None:
    """The row is drawn by a list of one chunk or several, or by a search."""
    count, vocab = len(RULES), 300
    inits = [make_row(row, seed=31 + row, **rule) for row, rule in enumerate(RULES)]
    logits = 1.5 * torch.randn(count, vocab, generator=torch.Generator().manual_seed(2))
    batch = Batch(logits.mul(2).round() / 2 if is_coarse else logits, inits, np.full(count, 9))
    expected = draw(batch, begin_rows(inits, vocab)[0])
    assert expected[0] == host_draw(batch, begin_rows(inits, vocab)[1]).tokens.tolist()
    assert draw(batch, begin_rows(inits, vocab)[0], chunk=64, listed=512) == expected
    alone = Batch(batch.logits[4:], [make_row(0, seed=35, **RULES[4])], batch.positions[4:])
    assert draw(alone, begin_rows(alone.inits, vocab)[0], chunk=512, listed=16) == ([expected[0][4]], [True])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_search_draws_what_the_list_draws() -> None:
    for seed in range(8):
        batch = random_batch(seed, 12, 700)
        expected = draw(batch, begin_rows(batch.inits, 700)[0])
        assert draw(batch, begin_rows(batch.inits, 700)[0], chunk=512, listed=16) == expected
        assert draw(batch, begin_rows(batch.inits, 700)[0], chunk=128, listed=256) == expected


def test_a_list_goes_down_to_the_last_token_that_is_kept() -> None:
    """The fourth token is alone in its level. The same holds for the last token of a nucleus."""
    rules = [{"top_k": 4}, {"top_p": 0.6}]
    # The first two seeds draw the fourth token, the others do not.
    inits = [make_row(row, seed=seed, **rules[row % 2]) for row, seed in enumerate((2, 4, 1, 0))]
    logits = torch.tensor([1.0, 1.0, 1.0, *[0.7] * 3]).expand(4, -1).contiguous()
    batch = Batch(logits, inits, np.full(4, 4))
    table, states = begin_rows(inits, 6)
    tokens, _ = draw(batch, table)
    assert tokens == host_draw(batch, states).tokens.tolist()
    assert max(tokens[::2]) == max(tokens[1::2]) == 3


def test_the_uniform_number_is_the_host_s() -> None:
    """With equal logits the token tells the number, to one part in V."""
    vocab, rng = 1 << 12, np.random.default_rng(1)
    seeds = rng.integers(0, 2**64, 6, dtype=np.uint64)
    inits = [make_row(row, seed=int(seed)) for row, seed in enumerate(seeds)]
    batch = Batch(torch.zeros(6, vocab), inits, rng.integers(4, 2**40, 6))
    tokens, _ = draw(batch, begin_rows(inits, vocab)[0], chunk=1024)
    assert tokens == (uniforms(seeds, batch.positions) * vocab).astype(int).tolist()


@pytest.mark.parametrize("bad", [np.nan, *(pytest.param(bad, marks=pytest.mark.slow) for bad in (-np.nan, np.inf))])
def test_a_row_that_is_not_finite_is_named_and_leaves_the_others_alone(bad: float) -> None:
    changes = [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.9}, {"top_p": 0.9}]
    inits = [make_row(row, seed=row, **change) for row, change in enumerate(changes)]
    logits = torch.randn(5, 700, generator=torch.Generator().manual_seed(0))
    clean, _ = draw(Batch(logits, inits, np.arange(4, 9)), begin_rows(inits, 700)[0])
    for rows in ({0, 2}, {1, 3}):
        broken = logits.clone()
        broken[list(rows), 699] = bad
        tokens, finite = draw(Batch(broken, inits, np.arange(4, 9)), begin_rows(inits, 700)[0])
        assert finite == [other not in rows for other in range(5)]
        assert [t for i, t in enumerate(tokens) if i not in rows] == [t for i, t in enumerate(clean) if i not in rows]


def test_a_row_without_any_token_left_is_not_finite_and_one_of_equals_is_the_first() -> None:
    inits = [make_row(0, min_new_tokens=2, stop_ids=(0, 1, 2)), make_row(1, temperature=0.0)]
    table, _ = begin_rows(inits, 3)
    logits = torch.tensor([[0.0, 0.0, 0.0], [-0.0, 0.0, 0.0]])
    assert draw(Batch(logits, inits, np.array([4, 4])), table)[1] == [False, True]
    tokens, finite = draw(Batch(logits, inits, np.array([6, 6])), table)
    assert finite == [True, True]
    assert tokens[1] == 0


def test_penalties_count_what_the_device_chose_without_a_word_from_the_host() -> None:
    init = make_row(temperature=0.0, frequency_penalty=1.0, history=pack_i32([3, 3, 3, 3]))
    table, _ = begin_rows([init], 4)
    logits = torch.tensor([[0.4, 1.0, 0.0, 0.3]])
    assert [draw(Batch(logits, [init], np.array([4 + i])), table)[0][0] for i in range(5)] == [1, 0, 3, 1, 2]
    init = make_row(temperature=0.0, presence_penalty=0.65, history=pack_i32([3, 3, 3, 3]))
    table, _ = begin_rows([init], 4)
    assert [draw(Batch(logits, [init], np.array([4 + i])), table)[0][0] for i in range(4)] == [1, 0, 1, 1]


def test_rows_that_fill_up_a_batch_change_nothing_and_logits_may_be_of_16_bits_in_wider_rows() -> None:
    inits = [make_row(row, seed=row, top_p=0.8) for row in range(2)]
    table, _ = begin_rows(inits, 300)
    wide = torch.randn(3, 320, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected, _ = draw(Batch(wide[:2, :300].float(), inits, np.array([4, 4])), table)
    tokens, finite = torch.full((3,), -5, device=DEVICE), torch.zeros(3, dtype=torch.bool, device=DEVICE)
    rows, positions = there(np.array([0, -1, 1])), there(np.array([4, 0, 4]))
    logits = there(wide[[0, 2, 1]])[:, :300]
    sample(logits, table, rows, positions, tokens, finite, make_work(3, 300, DEVICE))
    assert tokens.tolist() == [expected[0], -5, expected[1]]


def test_a_vocabulary_that_can_not_be_summed_is_refused() -> None:
    with pytest.raises(ValueError, match="larger than 524288"):
        make_table(1, 524289, 0, DEVICE)


@pytest.mark.parametrize(
    ("vocab", "num", "chunk"),
    [
        (700, 7, 256),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((5, 3, 64), (700, 0, 256), (4100, 20, 4096))),
    ],
)
def test_logprobs_are_the_host_s(vocab: int, num: int, chunk: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = torch.from_numpy((np.round(rng.standard_normal((4, vocab)) * 12) / 4).astype(np.float32))
    logits[1, 3] = np.nan
    logits[2, : vocab // 2] = -np.inf
    targets = rng.integers(vocab // 2, vocab, 4)
    chosen = torch.empty(4, device=DEVICE)
    ids, best = torch.empty((4, num), dtype=torch.int64, device=DEVICE), torch.empty((4, num), device=DEVICE)
    work = make_logprob_work(4, vocab, num, DEVICE, chunk)
    token_logprobs(there(logits), there(targets), chosen, ids, best, work, chunk)
    scored = score(logits, torch.from_numpy(targets), num)
    for row, expected in enumerate(listed_scores([array.numpy() for array in scored], [num] * 4)):
        if expected.bad:
            assert torch.isnan(chosen[row])
            continue
        assert chosen[row].item() == pytest.approx(expected.logprob.logprob, abs=1e-5)
        assert ids[row].tolist() == [token for token, _ in expected.logprob.top]
        assert best[row].tolist() == pytest.approx([value for _, value in expected.logprob.top], abs=1e-5)
