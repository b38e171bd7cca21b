"""Log-probabilities and their alternatives against float64, and how much memory a long prompt's take."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pdserve.model_runner.sampling import logprobs
from pdserve.model_runner.sampling.logprobs import CHUNK_LOGPROBS, Scores


def score(logits: torch.Tensor, targets: list[int], top_nums: list[int]) -> list[Scores]:
    scored = logprobs.score(logits, torch.tensor(targets), max(top_nums))
    return logprobs.listed([tensor.numpy() for tensor in scored], top_nums)


def test_scores_are_the_log_softmax_of_the_logits() -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((CHUNK_LOGPROBS // 5003 + 6, 5003)).astype(np.float32) * 5
    targets = rng.integers(0, 5003, len(logits)).tolist()
    top_nums = [int(num) for num in rng.integers(0, 6, len(logits))]
    scores = score(torch.from_numpy(logits), targets, top_nums)
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


def test_a_score_does_not_depend_on_the_other_rows() -> None:
    chunk = CHUNK_LOGPROBS // 49152
    logits = torch.randn(chunk + 5, 49152, generator=torch.Generator().manual_seed(0))
    targets = list(range(len(logits)))
    together = score(logits, targets, [i % 3 for i in targets])
    for i in (0, 1, chunk - 1, chunk, chunk + 4):
        assert score(logits[i : i + 1].clone(), [i], [i % 3]) == together[i : i + 1]


def test_more_alternatives_than_the_vocabulary_has_are_all_of_it() -> None:
    (scored,) = score(torch.tensor([[0.0, 2.0, 1.0]]), [0], [20])
    assert [token for token, _ in scored.logprob.top] == [1, 2, 0]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_named(bad: float) -> None:
    logits = torch.zeros(3, 1000)
    logits[1, 999] = bad
    assert [scored.bad for scored in score(logits, [1, 1, 1], [2, 2, 2])] == [False, True, False]


def test_a_long_prompt_never_holds_a_second_copy_of_its_logits() -> None:
    logits = torch.zeros(10 * CHUNK_LOGPROBS // 2048, 2048)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if (
                isinstance(out, torch.Tensor)
                and out.untyped_storage().data_ptr() != logits.untyped_storage().data_ptr()
            ):
                largest = max(largest, out.untyped_storage().nbytes())
            return out

    with Watch():
        assert len(score(logits, [0] * len(logits), [1] * len(logits))) == len(logits)
    assert 0 < largest <= logits.nbytes / 10
