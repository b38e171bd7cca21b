"""RMSNorm (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.reference import rms_norm


class RMSNorm:
    """Normalises the last dimension, of size ``size``."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self.eps = eps
        self.weight = torch.empty(size, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """The normalised ``x``, of the same shape and type."""
        return rms_norm(x, self.weight, self.eps)
