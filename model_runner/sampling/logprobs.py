"""Log-probabilities of the model's own distribution (before temperature and penalties), with the best alternatives.

In two halves: ``score`` is queued on the device with the step, ``listed`` makes of its outcome what an answer holds.

Shapes: N scored positions, V vocabulary, K alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
from torch import Tensor

from ...messages.outputs import TokenLogprob
from .top_tokens import top_tokens

# Log-probabilities held at once: a prompt of 2,000 tokens has 400 MB of logits and must not have as much of these, too.
# Small enough for the cache, which makes it several times as fast.
CHUNK_LOGPROBS = 1 << 20


class Scored(NamedTuple):
    """On the logits' device. ``targets`` [N] int64, ``logprobs`` [N] of them; ``ids`` [N, K], best first, and
    ``best`` [N, K], theirs.
    """

    targets: Tensor
    logprobs: Tensor
    ids: Tensor
    best: Tensor


class Scores(NamedTuple):
    """One position. ``bad``: the position's logits were not finite; its logprob means nothing."""

    logprob: TokenLogprob
    bad: bool


def score(logits_NV: Tensor, targets_N: Tensor, most: int) -> Scored:
    """Score each row of logits: its target's log-probability, and those of its ``most`` best tokens, in float32.

    Waits for nothing.
    """
    size = max(1, CHUNK_LOGPROBS // logits_NV.shape[1])
    chunks = [
        _score(logits_NV[begin : begin + size].float(), targets_N[begin : begin + size], most)
        for begin in range(0, max(1, len(targets_N)), size)
    ]
    return chunks[0] if len(chunks) == 1 else Scored(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))


def _score(logits_NV: Tensor, targets_N: Tensor, most: int) -> Scored:
    logprobs_NV = torch.log_softmax(logits_NV, 1)
    ids_NK = top_tokens(logits_NV, most).ids
    chosen_N = logprobs_NV.gather(1, targets_N[:, None])[:, 0]
    return Scored(targets_N, chosen_N, ids_NK, logprobs_NV.gather(1, ids_NK))


def listed(arrays: Sequence[npt.NDArray[Any]], top_nums: Sequence[int]) -> list[Scores]:
    """Each position of ``Scored`` (its arrays, on the host) with its ``top_nums[i]`` best tokens, best first."""
    rows = zip(*(array.tolist() for array in arrays), top_nums, strict=True)
    result = []
    for token, logprob, ids, best, num in rows:
        top = list(zip(ids[:num], best[:num], strict=True))
        # NaN and +inf anywhere in a row turn its normaliser, and with it every logprob, into NaN.
        result.append(Scores(TokenLogprob(token, logprob, top), logprob != logprob))
    return result
