"""Log-probabilities and their alternatives against float64, on the host and on a device."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from pdserve.model_runner.cpu_engine.build import levels_here
from pdserve.model_runner.sampling import logprobs
from pdserve.model_runner.sampling.device.logprobs import CHUNK_LOGPROBS
from pdserve.model_runner.sampling.device.logprobs import score as score_tensors
from pdserve.model_runner.sampling.logprobs import Scores
from pdserve.model_runner.sampling.rules import TorchRules
from pdserve.model_runner.sampling.sampled import HostSampler


@cache
def load_sampler(way: str) -> HostSampler:
    if way == "torch":
        return TorchRules()
    from pdserve.model_runner.sampling.native import NativeSampler

    return NativeSampler()


# Sums are computed twice: by torch operations, and by the CPU kernel.
@pytest.fixture(params=["torch", "kernel"] if levels_here() else ["torch"])
def sampler(request: pytest.FixtureRequest) -> HostSampler:
    return load_sampler(request.param)


def score(sampler: HostSampler, logits: torch.Tensor, targets: list[int], top_nums: list[int]) -> list[Scores]:
    rows = np.arange(len(targets))
    scored = logprobs.score(logits.numpy(), rows, np.array(targets, dtype=np.int64), max(top_nums, default=1), sampler)
    return logprobs.listed(scored, top_nums)


def test_scores_are_the_log_softmax_of_the_logits(sampler: HostSampler) -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((CHUNK_LOGPROBS // 5003 + 6, 5003)).astype(np.float32) * 5
    targets = rng.integers(0, 5003, len(logits)).tolist()
    top_nums = [int(num) for num in rng.integers(0, 6, len(logits))]
    scores = score(sampler, torch.from_numpy(logits), targets, top_nums)
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(1, keepdims=True))
    assert len(scores) == len(logits)
    for row, target, num, scored in zip(exact, targets, top_nums, scores, strict=True):
        assert scored.logprob.token_id == target
        assert scored.logprob.logprob == pytest.approx(row[target], abs=1e-5)
        best = np.argsort(-row)[:num]
        assert [token for token, _ in scored.logprob.top] == best.tolist()
        assert [value for _, value in scored.logprob.top] == pytest.approx(row[best].tolist(), abs=1e-5)
        assert not scored.bad


def test_a_score_does_not_depend_on_the_other_rows(sampler: HostSampler) -> None:
    chunk = CHUNK_LOGPROBS // 49152
    logits = torch.randn(chunk + 5, 49152, generator=torch.Generator().manual_seed(0))
    targets = list(range(len(logits)))
    together = score(sampler, logits, targets, [i % 3 for i in targets])
    for i in (0, 1, chunk - 1, chunk, chunk + 4):
        assert score(sampler, logits[i : i + 1].clone(), [i], [i % 3]) == together[i : i + 1]


def test_more_alternatives_than_the_vocabulary_has_are_all_of_it(sampler: HostSampler) -> None:
    (scored,) = score(sampler, torch.tensor([[0.0, 2.0, 1.0]]), [0], [20])
    assert [token for token, _ in scored.logprob.top] == [1, 2, 0]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_named(sampler: HostSampler, bad: float) -> None:
    logits = torch.zeros(3, 1000)
    logits[1, 999] = bad
    assert [scored.bad for scored in score(sampler, logits, [1, 1, 1], [2, 2, 2])] == [False, True, False]


@pytest.mark.parametrize("vocab", [97, 5003])
def test_scores_of_a_device_are_the_host_s(sampler: HostSampler, vocab: int) -> None:
    """Up to the order of sums; alternatives are the same, ties included."""
    logits = (torch.randn(40, vocab, generator=torch.Generator().manual_seed(0)) * 4).bfloat16().float()
    targets = np.arange(40) % vocab
    host = logprobs.score(logits.numpy(), np.arange(40), targets, 20, sampler)
    device = score_tensors(logits, torch.from_numpy(targets), 20)
    assert (host.targets.tolist(), host.ids.tolist()) == (device.targets.tolist(), device.ids.tolist())
    np.testing.assert_allclose(host.logprobs, device.logprobs.numpy(), rtol=0, atol=5e-6)
    np.testing.assert_allclose(host.best, device.best.numpy(), rtol=0, atol=5e-6)


def test_a_row_without_logits_above_minus_infinity_is_named(sampler: HostSampler) -> None:
    assert [scored.bad for scored in score(sampler, torch.full((1, 50), -torch.inf), [3], [2])] == [True]


def test_nothing_to_score(sampler: HostSampler) -> None:
    assert score(sampler, torch.empty(0, 50), [], []) == []


def test_some_rows_alone_are_scored_and_in_their_order(sampler: HostSampler) -> None:
    logits = torch.randn(5, 3000, generator=torch.Generator().manual_seed(0)).numpy()
    all_rows = logprobs.score(logits, np.arange(5), np.full(5, 7), 3, sampler)
    some = logprobs.score(logits, np.array([4, 1]), np.full(2, 7), 3, sampler)
    for whole, part in zip(all_rows, some, strict=True):
        assert part.tolist() == whole[[4, 1]].tolist()


@pytest.mark.skipif(not levels_here(), reason="this processor can't run the kernels")
def test_threads_share_the_rows() -> None:
    from pdserve.model_runner.cpu_engine.team import Team
    from pdserve.model_runner.sampling.native import NativeSampler

    logits, rows = torch.randn(9, 4099, generator=torch.Generator().manual_seed(0)).numpy(), np.arange(9)
    assert NativeSampler(Team(2)).log_sums(logits, rows).tolist() == NativeSampler().log_sums(logits, rows).tolist()
    with pytest.raises(IndexError, match="rows 0 to 9 of 9"):
        NativeSampler().log_sums(logits, np.arange(10))
