"""Which values stand for a tensor where two are told apart."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

SAMPLES = 64


def spread(size: int) -> Tensor:
    """``SAMPLES`` indices over ``size``, by a prime step, so that rows and columns don't move in lockstep."""
    return torch.from_numpy(np.arange(SAMPLES, dtype=np.int64) * 7919 % size)
