"""Samples of torch's tensors: the same bytes as those of arrays (``samples.py``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .samples import sample_header, sampled_places
from .tensors import dtype_of


def sample_tensor(name: str, tensor: Tensor, dtype: torch.dtype) -> bytes:
    """Return bytes that tell ``tensor``, converted to ``dtype``, from others with its name. It may be on any device."""
    if tensor.numel() == 0:
        return as_sample(name, tensor.shape, tensor, dtype)
    places = sampled_places(name, tensor.shape)
    rows = torch.from_numpy(places.rows).to(tensor.device)
    if places.columns is None:
        return as_sample(name, tensor.shape, tensor.reshape(-1)[rows], dtype)
    columns = torch.from_numpy(places.columns).to(tensor.device)
    return as_sample(name, tensor.shape, tensor.flatten(0, -2)[rows, columns], dtype)


def as_sample(name: str, shape: Sequence[int], found: Tensor, dtype: torch.dtype) -> bytes:
    """Return name, shape, type and the values ``found`` as bytes, for a tensor that is sampled elsewhere.

    ``found``: its floats at the indices that ``spread`` gives for rows and columns.
    """
    values = found.to(dtype).contiguous()
    return sample_header(name, shape, dtype_of(values)) + values.view(torch.uint8).cpu().numpy().tobytes()
