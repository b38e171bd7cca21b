"""Gated feed-forward network of one layer, or one of several that it has."""

from __future__ import annotations

import torch
from torch import Tensor

from ...model_files.spec import MLPSpec
from ..ops.base import DeviceOps
from ..ops.layers.linear import Linear, Linears, weights_of


class MLP:
    """``down(activation(gate(x)) * up(x))``."""

    def __init__(self, spec: MLPSpec, hidden: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._activation = spec.activation
        self.gate_up_proj = Linear(hidden, (spec.inner, spec.inner), bias=spec.bias, dtype=dtype, device=device)
        self.down_proj = Linear(spec.inner, (hidden,), bias=spec.bias, dtype=dtype, device=device)

    def forward(self, x_TN: Tensor, ops: DeviceOps) -> Tensor:
        """Return the network's output [T, N] for ``x_TN``."""
        return self.down_proj.forward(ops.gate_and_mul(self.gate_up_proj.forward(x_TN), self._activation))

    def weights(self, prefix: str) -> dict[str, Tensor]:
        """Return the network's weight tensors as views for the loader to fill, by names that begin with ``prefix``."""
        return weights_of(self.linears(prefix))

    def linears(self, prefix: str) -> Linears:
        """Return the network's linear operations, each by the names of the projections that are fused in it."""
        up = (f"{prefix}.gate_proj", f"{prefix}.up_proj")
        return {up: self.gate_up_proj, (f"{prefix}.down_proj",): self.down_proj}
