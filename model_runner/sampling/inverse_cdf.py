"""Random choice of a token: one uniform number for each (seed, position), and the inverse of a cumulative distribution.

Shapes: N rows, M weights a row (the vocabulary, or candidates in vocabulary order), G blocks of ``BLOCK`` weights.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from ...runtime.splitmix import GOLDEN, mix

BLOCK = 256


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1), of 53 random bits, for each (seed, position).

    The same pair always has the same number. The seed is mixed once so that neighbouring seeds start far apart; the
    position is the counter. There is no state: a request that is retracted, moved or replayed draws the same numbers
    again.
    """
    counters = mix(seeds + GOLDEN) + (positions.astype(np.uint64) + np.uint64(1)) * GOLDEN
    return (mix(counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def pick_few(weights_NM: Tensor, uniforms_N: Tensor) -> Tensor:
    """Return the first index of each row at which the cumulated weight exceeds the uniform number times the sum.

    ``weights_NM``: float32, not negative, with small M. Returns [N] int64; a row of zeros or NaN gives 0. Sums are
    float64: float32 running sums over a vocabulary are off by up to 1e-3, more than the rarest tokens weigh.
    """
    cumulative_NM = weights_NM.cumsum(1, dtype=torch.float64)
    return _first_above(cumulative_NM, uniforms_N.unsqueeze(1) * cumulative_NM[:, -1:])


def pick(weights_NM: Tensor, uniforms_N: Tensor) -> Tensor:
    """Return the index that ``pick_few`` would choose in each row, faster for a whole vocabulary ([N] int64).

    Finds the block first and then the weight in it, so that few sums are cumulated.
    """
    size = weights_NM.shape[1]
    if size % BLOCK:
        weights_NM = pad(weights_NM, (0, BLOCK - size % BLOCK))
    blocks_NGb = weights_NM.view(len(weights_NM), -1, BLOCK)
    cumulative_NG = blocks_NGb.sum(2).cumsum(1, dtype=torch.float64)
    target_N1 = uniforms_N.unsqueeze(1) * cumulative_NG[:, -1:]
    block_N1 = _first_above(cumulative_NG, target_N1).unsqueeze(1)
    before_N1 = torch.where(block_N1 > 0, cumulative_NG.gather(1, (block_N1 - 1).clamp(min=0)), 0.0)
    inside_Nb = blocks_NGb.gather(1, block_N1.unsqueeze(2).expand(-1, -1, BLOCK)).squeeze(1)
    offset_N = _first_above(inside_Nb.cumsum(1, dtype=torch.float64), target_N1 - before_N1)
    return block_N1.squeeze(1) * BLOCK + offset_N


def _first_above(cumulative_NM: Tensor, target_N1: Tensor) -> Tensor:
    """Return the first index of each row with a sum above the target ([N] int64).

    If rounding left no sum above it, return the last index that has weight.
    """
    index_N = (cumulative_NM <= target_N1).sum(1)
    return torch.minimum(index_N, (cumulative_NM < cumulative_NM[:, -1:]).sum(1))
