"""Mixture of experts: the networks of one layer, of which each token goes through a few (Shazeer et al., 2017).

The router computes in float32 whatever the model does: a token that goes to another expert for a rounding error is
another token. What the experts give is added up in float32, too, in the order of their numbers. So nothing of a token
depends on those beside it but for the rounding of the products, which like those of the dense layers are torch's own,
of as many rows as an expert has tokens.

Shapes: T tokens, N hidden size, E experts, C chosen ones, I inner size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from ...model_files.spec import ExpertsSpec
from ..device_ops.base import DeviceOps
from ..kernels.reference import clamped_gate_and_mul, gate_and_mul, linear
from ..layers.linear import Linear, Linears, weights_of
from .mlp import MLP
from .routing import Choice, choose_experts


class StackedLinear:
    """A ``Linear`` for each expert: ``weight`` [E, sum(outs), in], ``bias`` [E, sum(outs)] or None.

    The stack takes memory as the first expert's weight is asked for: where all are packed, never.
    """

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
        self._shape = (experts, sum(outs), in_features)
        self._dtype, self._device = dtype, device
        self.bias = torch.empty(experts, sum(outs), dtype=dtype, device=device) if bias else None
        self.experts = [_ExpertLinear(self, i, in_features, outs, dtype, device) for i in range(experts)]

    @cached_property
    def weight(self) -> Tensor:
        """Of all experts that have floats."""
        return torch.empty(self._shape, dtype=self._dtype, device=self._device)

    @property
    def nbytes(self) -> int:
        """Of weights, once they are there."""
        return sum((expert.weight if expert.packed is None else expert.packed).nbytes for expert in self.experts)

    def forward(self, expert: int, x: Tensor) -> Tensor:
        """All projections of one expert; their outputs lie side by side."""
        return self.experts[expert].forward(x)

    def linears(self, prefix: str, *names: str) -> Linears:
        """Each expert's, by the names of what it projects to, in order: ``prefix.7.name``."""
        return {tuple(f"{prefix}.{i}.{name}" for name in names): expert for i, expert in enumerate(self.experts)}

    def weights(self, prefix: str, *names: str) -> dict[str, Tensor]:
        """The views that take each expert's projections, projection by projection: ``prefix.7.name.weight``."""
        views = weights_of(self.linears(prefix, *names))
        kinds = ("weight",) if self.bias is None else ("weight", "bias")
        ordered = [f"{i}.{name}.{kind}" for kind in kinds for name in names for i in range(len(self.experts))]
        return {f"{prefix}.{each}": views[f"{prefix}.{each}"] for each in ordered}


class _ExpertLinear(Linear):
    """One of a stack."""

    def __init__(
        self,
        stack: StackedLinear,
        expert: int,
        in_features: int,
        outs: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(in_features, outs, bias=False, dtype=dtype, device=device)
        self._stack, self._expert = stack, expert
        self.bias = None if stack.bias is None else stack.bias[expert]

    @cached_property
    def weight(self) -> Tensor:
        """See the base class."""
        return self._stack.weight[self._expert]


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
        nbytes = self.gate_up_proj.nbytes + self.down_proj.nbytes
        return nbytes * (self.spec.count - self.spec.chosen) // self.spec.count

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
        """The experts' and the shared one's, each by the names of what it projects to."""
        found = {
            **self.gate_up_proj.linears(f"{prefix}.experts", "gate_proj", "up_proj"),
            **self.down_proj.linears(f"{prefix}.experts", "down_proj"),
        }
        return found if self.shared is None else {**found, **self.shared.linears(f"{prefix}.shared")}

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
