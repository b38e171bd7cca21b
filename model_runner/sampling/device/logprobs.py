"""Log-probabilities on a device, queued with the step; ``sampling/logprobs.py`` has the host's.

Shapes: N scored positions, V vocabulary, K alternatives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..sampled import Scored
from ..top_tokens import top_tokens

CHUNK_LOGPROBS = 1 << 20
"""Log-probabilities held at once: a prompt of 2,000 tokens has 400 MB of logits and must not have as much of these."""


def score(logits_NV: Tensor, targets_N: Tensor, most: int) -> Scored[Tensor]:
    """Queue the log-probability of each row's target, and those of its ``most`` likeliest tokens, in float32.

    Never waits for the device.
    """
    size = max(1, CHUNK_LOGPROBS // logits_NV.shape[1])
    chunks = [
        _score(logits_NV[begin : begin + size].float(), targets_N[begin : begin + size], most)
        for begin in range(0, max(1, len(targets_N)), size)
    ]
    return chunks[0] if len(chunks) == 1 else Scored(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))


def _score(logits_NV: Tensor, targets_N: Tensor, most: int) -> Scored[Tensor]:
    logprobs_NV = torch.log_softmax(logits_NV, 1)
    ids_NK = top_tokens(logits_NV, most).ids
    chosen_N = logprobs_NV.gather(1, targets_N[:, None])[:, 0]
    return Scored(targets_N, chosen_N, ids_NK, logprobs_NV.gather(1, ids_NK))
