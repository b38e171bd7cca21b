"""Which values stand for a tensor where two are told apart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

SAMPLES = 64


def spread(size: int) -> Tensor:
    """``SAMPLES`` indices over ``size``, by a prime step, so that rows and columns don't move in lockstep."""
    return torch.from_numpy(np.arange(SAMPLES, dtype=np.int64) * 7919 % size)


def sample(name: str, tensor: Tensor, dtype: torch.dtype) -> bytes:
    """What tells ``tensor``, as ``dtype``, from others of its name."""
    if tensor.numel() == 0:
        return as_sample(name, tensor.shape, tensor, dtype)
    view = tensor.reshape(-1) if tensor.dim() < 2 else tensor.flatten(0, -2)
    rows = spread(view.shape[0])
    found = view[rows] if view.dim() == 1 else view[rows, spread(view.shape[1])]
    return as_sample(name, tensor.shape, found, dtype)


def as_sample(name: str, shape: Sequence[int], found: Tensor, dtype: torch.dtype) -> bytes:
    """``sample`` of a tensor of that ``shape``; ``found``: its floats at the ``spread`` of rows and columns."""
    told = f"{name}{list(shape)}{dtype}".encode()
    return told + found.to(dtype).contiguous().view(torch.uint8).cpu().numpy().tobytes()
