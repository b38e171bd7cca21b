"""Mixture of experts: the networks of one layer, of which each token goes through a few (Shazeer et al., 2017).

The router computes in float32 whatever the model does: a rounding error that selects another expert gives another
token. The experts' outputs are added up in float32, too, in the order of their numbers (``DeviceOps``). So a token
depends on those beside it by the rounding of the products only. Torch's products, like those of the dense layers, have
as many rows as an expert has tokens. Those of ``grouped_gemm.py`` have blocks of one size.

Shapes: T tokens, N hidden size, E experts, C chosen ones, I inner size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...model_files.spec import ExpertsSpec
from ..ops.base import DeviceOps
from ..ops.layers.expert_networks import ExpertNetworks, StackedLinear
from ..ops.layers.linear import Linear, Linears
from ..ops.reference import linear
from .mlp import MLP
from .routing import choose_experts


class Experts:
    """Takes an ``MLP``'s place; ``spec`` may be a rank's own. ``router``, ``choice_bias``, ``shared_gate``: float32."""

    def __init__(self, spec: ExpertsSpec, hidden: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        exact, stacked = torch.float32, (spec.inner, spec.inner)
        self.router = Linear(hidden, (spec.count,), bias=spec.router_bias, dtype=exact, device=device)
        self.choice_bias = torch.empty(spec.count, dtype=exact, device=device) if spec.choice_bias else None
        self.gate_up_proj = StackedLinear(spec.count, hidden, stacked, bias=spec.bias, dtype=dtype, device=device)
        self.down_proj = StackedLinear(spec.count, spec.inner, (hidden,), bias=spec.bias, dtype=dtype, device=device)
        self.networks = ExpertNetworks(spec, self.gate_up_proj, self.down_proj)
        self.shared = None if spec.shared is None else MLP(spec.shared, hidden, dtype=dtype, device=device)
        self.shared_gate = torch.empty(1, hidden, dtype=exact, device=device) if spec.shared_gate else None

    @property
    def idle_bytes(self) -> int:
        """Bytes of experts' weights that a pass of one token does not read."""
        nbytes = self.gate_up_proj.nbytes + self.down_proj.nbytes
        return nbytes * (self.spec.count - self.spec.chosen) // self.spec.count

    def forward(self, x_TN: Tensor, ops: DeviceOps) -> Tensor:
        """Return the weighted sum of each token's chosen experts, plus the shared expert's output, if any: [T, N]."""
        exact_TN = x_TN.float()
        choice = choose_experts(self.spec, self.router.forward(exact_TN), self.choice_bias)
        sum_TN = ops.run_experts(x_TN, self.networks, choice.experts, choice.weights)
        if self.shared is not None:
            common_TN = self.shared.forward(x_TN, ops).float()
            if self.shared_gate is not None:
                common_TN *= linear(exact_TN, self.shared_gate, None).sigmoid()
            sum_TN += common_TN
        return sum_TN.to(x_TN.dtype)

    def weights(self, prefix: str) -> dict[str, Tensor]:
        """Return the layer's weight tensors as views for the loader to fill, by the engine's names after ``prefix``."""
        views = self.router.weights(f"{prefix}.router")
        views |= self.gate_up_proj.weights(f"{prefix}.experts", "gate_proj", "up_proj")
        views |= self.down_proj.weights(f"{prefix}.experts", "down_proj")
        if self.choice_bias is not None:
            views[f"{prefix}.router.choice_bias"] = self.choice_bias
        if self.shared is not None:
            views |= self.shared.weights(f"{prefix}.shared")
        if self.shared_gate is not None:
            views[f"{prefix}.shared_gate.weight"] = self.shared_gate
        return views

    def linears(self, prefix: str) -> Linears:
        """Return the linear operations of all experts and of the shared one, each by the names of its projections."""
        found = {
            **self.gate_up_proj.linears(f"{prefix}.experts", "gate_proj", "up_proj"),
            **self.down_proj.linears(f"{prefix}.experts", "down_proj"),
        }
        return found if self.shared is None else {**found, **self.shared.linears(f"{prefix}.shared")}
