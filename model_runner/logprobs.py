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

# Rows of log-probabilities held at once: 64 rows of a vocabulary of 150,000 are 38 MB, where all positions of a long
# prompt would double the gigabytes that its logits take already.
CHUNK_ROWS = 64


class Scores(NamedTuple):
    """One position. ``bad``: the position's logits were not finite; its logprob means nothing."""

    logprob: TokenLogprob
    bad: bool


def score(logits_NV: Tensor, targets: Sequence[int], top_nums: Sequence[int]) -> list[Scores]:
    """Logprob of ``targets[i]`` under row i of float32 logits, with its ``top_nums[i]`` best tokens, best first."""
    return list(_scores(logits_NV, targets, top_nums))


def _scores(logits_NV: Tensor, targets: Sequence[int], top_nums: Sequence[int]) -> Iterator[Scores]:
    for begin in range(0, len(targets), CHUNK_ROWS):
        chunk = slice(begin, begin + CHUNK_ROWS)
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
