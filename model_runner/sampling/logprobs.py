"""Log-probabilities of the model's own distribution (before temperature and penalties), with the best alternatives.

In two halves: ``score`` is for logits on the host, ``sampling/device/logprobs.py`` for a device, and ``listed`` makes
of either's outcome what an answer holds.

Shapes: N scored positions, V vocabulary, K alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...messages.outputs import TokenLogprob
from .row_params import F32, I64
from .sampled import HostArray, HostSampler, Scored
from .top_ids import top_ids


class Scores(NamedTuple):
    """One position."""

    logprob: TokenLogprob
    bad: bool
    """Whether the position's logits were not finite, so that its log-probability means nothing."""


def score(logits_NV: F32, rows: I64, targets: I64, most: int, sampler: HostSampler) -> Scored[HostArray]:
    """Return the log-probability of a target at each position, and those of its ``most`` likeliest tokens, in float32.

    ``rows``: index of each position's row of logits. ``targets``: each position's token.
    """
    sums, best = sampler.log_sums(logits_NV, rows), min(most, logits_NV.shape[1])
    ids = np.empty((len(rows), best), dtype=np.int64)
    for i, row in enumerate(rows.tolist()):
        ids[i] = top_ids(logits_NV[row], best)
    logprobs = (logits_NV[rows, targets] - sums).astype(np.float32)
    return Scored(targets, logprobs, ids, (logits_NV[rows[:, None], ids] - sums[:, None]).astype(np.float32))


def listed(arrays: Sequence[HostArray], top_nums: Sequence[int]) -> list[Scores]:
    """Return each position's log-probability with its likeliest tokens, best first, as the answer lists them.

    ``arrays``: the fields of ``Scored``, on the host. ``top_nums``: how many likeliest tokens each position lists, at
    most as many as were computed. A position with a log-probability of NaN is marked as bad.
    """
    rows = zip(*(array.tolist() for array in arrays), top_nums, strict=True)
    result = []
    for token, logprob, ids, best, num in rows:
        top = list(zip(ids[:num], best[:num], strict=True))
        # NaN and +inf anywhere in a row turn its normaliser, and with it every logprob, into NaN.
        result.append(Scores(TokenLogprob(token, logprob, top), logprob != logprob))
    return result
