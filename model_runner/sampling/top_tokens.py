"""The most likely tokens of each row, exactly, without sorting the vocabulary.

"Best" is one total order everywhere (sampling, greedy, logprobs): larger logit first, and among equal logits the lower
token id. Low-precision models produce equal logits all the time. ``torch.topk`` promises nothing about ties, so its
answer would depend on how the library happens to read the row.

Shapes: N rows, V vocabulary, K wanted tokens, G blocks of ``BLOCK`` neighbouring tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 32
_LOW_32 = (1 << 32) - 1


class TopTokens(NamedTuple):
    """Best first. ``values``: [N, K] float32, ``ids``: [N, K] int64."""

    values: Tensor
    ids: Tensor


def top_tokens(logits_NV: Tensor, k: int) -> TopTokens:
    """Return the ``k`` best tokens of each row of float32 logits, or all V if these are fewer, with their logits.

    Each row's result depends on that row alone. Rows with NaN give meaningless ids.

    Every one of the k best tokens lies in one of the k blocks with the largest maximum (ties: the lower block). So one
    vectorised pass for the maxima leaves only ``k * BLOCK`` candidates to select from.
    """
    vocab = logits_NV.shape[1]
    k = min(k, vocab)
    if k == 0:
        return TopTokens(logits_NV[:, :0], torch.empty((len(logits_NV), 0), dtype=torch.int64, device=logits_NV.device))
    if 2 * k * BLOCK >= vocab:
        ids_NV = torch.arange(vocab, device=logits_NV.device).expand_as(logits_NV)
        return _select(logits_NV, ids_NV, k)
    whole = vocab // BLOCK * BLOCK
    blocks_NGb = logits_NV[:, :whole].view(len(logits_NV), whole // BLOCK, BLOCK)
    maxima_NG = blocks_NGb.amax(2)
    block_ids_G = torch.arange(maxima_NG.shape[1], device=logits_NV.device)
    best_blocks_NK = _select(maxima_NG, block_ids_G.expand_as(maxima_NG), k).ids
    values = blocks_NGb.gather(1, best_blocks_NK.unsqueeze(2).expand(-1, -1, BLOCK)).flatten(1)
    offsets_b = torch.arange(BLOCK, device=logits_NV.device)
    ids = (best_blocks_NK.unsqueeze(2) * BLOCK + offsets_b).flatten(1)
    if whole < vocab:
        tail_ids = torch.arange(whole, vocab, device=logits_NV.device).expand(len(ids), -1)
        values = torch.cat((values, logits_NV[:, whole:]), 1)
        ids = torch.cat((ids, tail_ids), 1)
    return _select(values, ids, k)


def _select(values_NM: Tensor, ids_NM: Tensor, k: int) -> TopTokens:
    """Return the ``k`` best of each row's M candidates, by value, then by lower id.

    Ids are below 2**32 and distinct within a row.
    """
    # One int64 key holds the whole order, so no two keys are equal. The upper half is the float's bits made monotone,
    # and the lower half falls as the id rises. Adding 0.0 turns -0.0, which equals 0.0 but has other bits, into 0.0.
    bits = (values_NM + 0.0).view(torch.int32)
    monotone = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (monotone.to(torch.int64) << 32) | (_LOW_32 - ids_NM)
    best = keys.topk(k, dim=1)
    return TopTokens(values_NM.gather(1, best.indices), _LOW_32 - (best.values & _LOW_32))
