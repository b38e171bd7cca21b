"""Mixture of experts: the networks of one layer, of which each token goes through a few (Shazeer et al., 2017).

The router computes in float32 whatever the model does: a token that goes to another expert for a rounding error is
another token. What the experts give is added up in float32, too, in the order of their numbers. So nothing of a token
depends on those beside it but for the rounding of the products, which like those of the dense layers are torch's own,
of as many rows as an expert has tokens.

Shapes: T tokens, N hidden size, E experts, C chosen ones, I inner size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...model_files.spec import ExpertsSpec
from ..device_ops.base import DeviceOps
from ..kernels.reference import clamped_gate_and_mul, gate_and_mul, linear
from ..layers.linear import Linear, Linears
from .mlp import MLP
from .routing import Choice, choose_experts


class StackedLinear:
    """A ``Linear`` for each expert: ``weight`` [E, sum(outs), in], ``bias`` [E, sum(outs)] or None."""

    def __init__(
        self,
        experts: int,
        in_features: int,
        outs: Sequence[int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.outs = list(outs)
        self.weight = torch.empty(experts, sum(outs), in_features, dtype=dtype, device=device)
        self.bias = torch.empty(experts, sum(outs), dtype=dtype, device=device) if bias else None

    def forward(self, expert: int, x: Tensor) -> Tensor:
        """All projections of one expert; their outputs lie side by side."""
        return linear(x, self.weight[expert], None if self.bias is None else self.bias[expert])

    def weights(self, prefix: str, *names: str) -> dict[str, Tensor]:
        """The views that take each expert's projections, in order: ``prefix.7.name.weight``."""
        views: dict[str, Tensor] = {}
        for kind, stack in (("weight", self.weight), ("bias", self.bias)):
            if stack is not None:
                for name, part in zip(names, torch.split(stack, self.outs, 1), strict=True):
                    views |= {f"{prefix}.{expert}.{name}.{kind}": view for expert, view in enumerate(part)}
        return views


class Experts:
    """Takes an ``MLP``'s place; ``spec`` may be a rank's own. ``router``, ``choice_bias``, ``shared_gate``: float32."""

    def __init__(self, spec: ExpertsSpec, hidden: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        exact, stacked = torch.float32, (spec.inner, spec.inner)
        self.router = Linear(hidden, (spec.count,), bias=spec.router_bias, dtype=exact, device=device)
        self.choice_bias = torch.empty(spec.count, dtype=exact, device=device) if spec.choice_bias else None
        self.gate_up_proj = StackedLinear(spec.count, hidden, stacked, bias=spec.bias, dtype=dtype, device=device)
        self.down_proj = StackedLinear(spec.count, spec.inner, (hidden,), bias=spec.bias, dtype=dtype, device=device)
        self.shared = None if spec.shared is None else MLP(spec.shared, hidden, dtype=dtype, device=device)
        self.shared_gate = torch.empty(1, hidden, dtype=exact, device=device) if spec.shared_gate else None

    @property
    def idle_bytes(self) -> int:
        """Of weights, that a pass of one token does not read."""
        stacks = (self.gate_up_proj.weight, self.down_proj.weight)
        return sum(stack.nbytes for stack in stacks) * (self.spec.count - self.spec.chosen) // self.spec.count

    def forward(self, x_TN: Tensor, ops: DeviceOps) -> Tensor:
        """[T, N]."""
        exact_TN = x_TN.float()
        choice = choose_experts(self.spec, self.router.forward(exact_TN), self.choice_bias)
        sum_TN = torch.zeros_like(exact_TN)
        self._add_chosen(sum_TN, x_TN, choice)
        if self.shared is not None:
            common_TN = self.shared.forward(x_TN, ops).float()
            if self.shared_gate is not None:
                common_TN *= linear(exact_TN, self.shared_gate, None).sigmoid()
            sum_TN += common_TN
        return sum_TN.to(x_TN.dtype)

    def weights(self, prefix: str) -> dict[str, Tensor]:
        """The views that take the layer's tensors, by our names."""
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
        """Of the shared expert, each by the names of what it projects to."""
        return {} if self.shared is None else self.shared.linears(f"{prefix}.shared")

    def _add_chosen(self, sum_TN: Tensor, x_TN: Tensor, choice: Choice) -> None:
        """Each expert once, over the tokens that have chosen it; in a token's own order it would be once for each."""
        chosen, weights = choice.experts.flatten(), choice.weights.flatten()
        pairs = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=self.spec.count).tolist()
        for expert, own in enumerate(torch.split(pairs, counts)):
            if len(own):
                tokens = own // self.spec.chosen
                out = self._forward(expert, x_TN[tokens])
                sum_TN.index_add_(0, tokens, out.float() * weights[own, None])

    def _forward(self, expert: int, x: Tensor) -> Tensor:
        gate_up = self.gate_up_proj.forward(expert, x)
        if self.spec.limit is None:
            inner = gate_and_mul(gate_up, self.spec.activation)
        else:
            inner = clamped_gate_and_mul(gate_up, self.spec.limit)
        return self.down_proj.forward(expert, inner)
