"""Log-probabilities of the model's own distribution (before temperature and penalties), with the best alternatives.

Shapes: N scored positions, V vocabulary, K alternatives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..messages.outputs import TokenLogprob
from .top_tokens import top_tokens

# Log-probabilities held at once: a prompt of 2,000 tokens has 400 MB of logits and must not have as much of these, too.
# Small enough for the cache, which makes it several times as fast.
CHUNK_LOGPROBS = 1 << 20


class Scores(NamedTuple):
    """One position. ``bad``: the position's logits were not finite; its logprob means nothing."""

    logprob: TokenLogprob
    bad: bool


def score(logits_NV: Tensor, targets: Sequence[int], top_nums: Sequence[int]) -> list[Scores]:
    """Logprob of ``targets[i]`` under row i of float32 logits, with its ``top_nums[i]`` best tokens, best first."""
    return list(_scores(logits_NV, targets, top_nums))


def _scores(logits_NV: Tensor, targets: Sequence[int], top_nums: Sequence[int]) -> Iterator[Scores]:
    size = max(1, CHUNK_LOGPROBS // logits_NV.shape[1])
    for begin in range(0, len(targets), size):
        chunk = slice(begin, begin + size)
        logits = logits_NV[chunk]
        logprobs = torch.log_softmax(logits, 1)
        target_ids = torch.tensor(targets[chunk], device=logits.device).unsqueeze(1)
        chosen = logprobs.gather(1, target_ids).squeeze(1).tolist()
        ids = top_tokens(logits, max(top_nums[chunk])).ids
        best = logprobs.gather(1, ids).tolist()
        rows = zip(targets[chunk], chosen, ids.tolist(), best, top_nums[chunk], strict=True)
        for token, logprob, best_ids, best_logprobs, num in rows:
            top = list(zip(best_ids[:num], best_logprobs[:num], strict=True))
            # NaN and +inf anywhere in a row turn its normaliser, and with it every logprob, into NaN.
            yield Scores(TokenLogprob(token, logprob, top), logprob != logprob)
