"""Linear layers, single and fused."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.reference import linear


class Linear:
    """``x`` [T, in] → [T, sum(outs)]: several projections of one input, fused into one weight."""

    def __init__(
        self, in_features: int, outs: Sequence[int], *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.outs = list(outs)
        self.weight = torch.empty(sum(outs), in_features, dtype=dtype, device=device)
        self.bias = torch.empty(sum(outs), dtype=dtype, device=device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Apply all projections; their outputs lie side by side."""
        return linear(x, self.weight, self.bias)

    def weights(self, *names: str) -> dict[str, Tensor]:
        """The views that take the checkpoint's separate projections, in order, by name."""
        views = {f"{name}.weight": part for name, part in zip(names, torch.split(self.weight, self.outs), strict=True)}
        if self.bias is not None:
            views |= {f"{name}.bias": part for name, part in zip(names, torch.split(self.bias, self.outs), strict=True)}
        return views
