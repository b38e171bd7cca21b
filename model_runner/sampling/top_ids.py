"""The most likely tokens of a row of logits on the host, exactly, without sorting the vocabulary.

The order is that of ``top_tokens.py``, which has the same rule for tensors: larger logit first, and among equal logits
the lower token id.

Shapes: V vocabulary, K wanted tokens, G groups of tokens.
"""

from __future__ import annotations

import numpy as np

from .row_params import F32, I64

GROUP = 32
"""Tokens of a group: few enough that one maximum for each group leaves little to select from."""


def top_ids(row_V: F32, k: int) -> I64:
    """Return the ids of the ``k`` (at most V) best tokens, best first. A row with NaN gives ids that mean nothing."""
    vocab = len(row_V)
    k = min(k, vocab)
    groups = vocab // GROUP
    if k == 0:
        return np.empty(0, dtype=np.int64)
    candidates = np.arange(vocab)
    if k < groups:
        # At least k groups reach the k-th largest maximum, so no smaller logit is among the k best. A group's tokens
        # lie far apart: the maxima of neighbouring groups are computed side by side.
        maxima_G = row_V[: groups * GROUP].reshape(GROUP, groups).max(0)
        candidates = np.flatnonzero(row_V >= np.partition(maxima_G, groups - k)[groups - k])
    if len(candidates) < k:
        # The maximum of a group with NaN is NaN, and nothing compares with it.
        return np.arange(k)
    order = np.argsort(-row_V[candidates], kind="stable")[:k]
    return candidates[order]
