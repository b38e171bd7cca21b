"""Weights between NumPy's arrays and torch's tensors, without copies."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .arrays import Array, as_bits, float_type, type_name
from .base import WeightPlace


class TensorPlace(WeightPlace):
    """A tensor, or a view of a part of one."""

    def __init__(self, view: Tensor) -> None:
        self._view = view
        self.nbytes = view.nbytes
        self.dtype = dtype_of(view)

    def take(self, values: Array) -> None:
        """Copy floats of the view's shape into it, and convert them to its type."""
        self._view.copy_(to_tensor(values))

    def clear(self) -> None:
        """Fill the view with 0."""
        self._view.zero_()


def dtype_of(tensor: Tensor) -> str:
    """Return the name of a tensor's type, such as "bfloat16"."""
    return str(tensor.dtype).removeprefix("torch.")


def to_tensor(values: Array) -> Tensor:
    """Return a tensor on the CPU that shares the memory of ``values``, or of a copy if they can't be written to."""
    bits = torch.from_numpy(np.require(as_bits(values), requirements="W"))
    return bits if values.dtype.names is None else bits.view(getattr(torch, type_name(values.dtype)))


def to_array(tensor: Tensor) -> Array:
    """Return an array that shares the memory of ``tensor``, which is on the CPU."""
    dtype = float_type(dtype_of(tensor))
    if dtype.names is None:
        plain: Array = tensor.numpy()
        return plain
    bits = tensor.view(torch.uint8 if dtype.itemsize == 1 else torch.int16).numpy()
    return bits.view(np.dtype(f"u{dtype.itemsize}")).view(dtype)
