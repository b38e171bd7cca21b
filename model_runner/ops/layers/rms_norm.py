"""RMSNorm (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from ....model_files.spec import NormSpec
from ..reference import rms_norm


class RMSNorm:
    """Normalises the last dimension, of size ``size``; weights and arithmetic are float32, whatever goes in."""

    def __init__(self, size: int, spec: NormSpec, *, device: torch.device) -> None:
        self.spec = spec
        self.eps = spec.eps
        self._offset = spec.offset
        self.weight = torch.empty(size, dtype=torch.float32, device=device)
        """Weight [size] as the checkpoint has it, without the family's offset."""

    @property
    def scale(self) -> Tensor:
        """Factors [size] that normalised elements are multiplied by: the weight plus the family's offset."""
        return self.weight + self._offset if self._offset else self.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``, normalised along its last dimension in float32, with the shape and type of ``x``."""
        return rms_norm(x.float(), self.scale, self.eps).to(x.dtype)
