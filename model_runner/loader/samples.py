"""Samples: values that stand for a tensor when checkpoints are told apart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...model_files.tensor_names import EMBEDDING

SAMPLES = 64
OF_A_ROW = 4
"""Values of each row of the table of embeddings.

Adding tokens to a model may change their rows and nothing else, and the KV of prompts with them differs.
"""


def spread(size: int) -> Tensor:
    """Return ``SAMPLES`` indices below ``size`` as int64.

    They go by a prime step, so that rows and columns don't move in lockstep.
    """
    return torch.from_numpy(np.arange(SAMPLES, dtype=np.int64) * 7919 % size)


def sample(name: str, tensor: Tensor, dtype: torch.dtype) -> bytes:
    """Return bytes that tell ``tensor``, converted to ``dtype``, from others with its name.

    They are its name, shape, type and a few values; of the table of embeddings, some values of every row.
    """
    if tensor.numel() == 0:
        return as_sample(name, tensor.shape, tensor, dtype)
    view = tensor.reshape(-1) if tensor.dim() < 2 else tensor.flatten(0, -2)
    if view.dim() == 2 and name.endswith(EMBEDDING):
        rows = torch.arange(view.shape[0]).repeat_interleave(OF_A_ROW)
        # By a prime step here, too; the values of one row lie apart.
        columns = (rows * 7919 + torch.arange(len(rows)) % OF_A_ROW * (view.shape[1] // OF_A_ROW)) % view.shape[1]
        return as_sample(name, tensor.shape, view[rows, columns], dtype)
    rows = spread(view.shape[0])
    found = view[rows] if view.dim() == 1 else view[rows, spread(view.shape[1])]
    return as_sample(name, tensor.shape, found, dtype)


def as_sample(name: str, shape: Sequence[int], found: Tensor, dtype: torch.dtype) -> bytes:
    """Return name, shape, type and the values ``found`` as bytes, for a tensor that is sampled elsewhere.

    ``found``: its floats at the indices that ``spread`` gives for rows and columns.
    """
    header = f"{name}{list(shape)}{dtype}".encode()
    return header + found.to(dtype).contiguous().view(torch.uint8).cpu().numpy().tobytes()
