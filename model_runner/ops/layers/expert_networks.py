"""The networks of a layer's experts: a linear layer for each, their weights in one stack.

Shapes: E experts, I inner size, N hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ....model_files.spec import ExpertsSpec
from ..packed.weights import PackedWeight
from ..reference import clamped_gate_and_mul, gate_and_mul
from .linear import Linear, Linears, Product, weights_of


class StackedLinear:
    """A ``Linear`` for each expert: ``weight`` [E, sum(outs), in], ``bias`` [E, sum(outs)] or None.

    The stack takes memory as the first expert's weight is asked for: where all are packed, never.
    ``is_packed``: whether some are, so that the stack does not hold all.
    """

    is_packed = False

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
        """Weights of all experts, [E, sum(outs), in], uninitialised until loaded; allocated at the first use."""
        return torch.empty(self._shape, dtype=self._dtype, device=self._device)

    @property
    def nbytes(self) -> int:
        """Bytes of all experts' weights, floats or packed, after they are loaded."""
        return sum((expert.weight if expert.packed is None else expert.packed).nbytes for expert in self.experts)

    def forward(self, expert: int, x: Tensor) -> Tensor:
        """Return all projections of ``x`` [T, in] by one expert, side by side: [T, sum(outs)]."""
        return self.experts[expert].forward(x)

    def linears(self, prefix: str, *names: str) -> Linears:
        """Return each expert's linear operation, keyed by the checkpoint's names of the projections fused in it.

        The key of expert 7 is a tuple with ``prefix.7.name`` for each of ``names``.
        """
        return {tuple(f"{prefix}.{i}.{name}" for name in names): expert for i, expert in enumerate(self.experts)}

    def weights(self, prefix: str, *names: str) -> dict[str, Tensor]:
        """Return each expert's weight tensors as views, projection by projection: ``prefix.7.name.weight``."""
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
        """View of this expert's weight in the stack, [sum(outs), in]."""
        return self._stack.weight[self._expert]

    def use_packed(self, weight: PackedWeight, product: Product) -> None:
        """Multiply this expert with the packed ``weight`` by ``product`` from now on.

        The stack of all experts then counts as packed, even if other experts have floats.
        """
        super().use_packed(weight, product)
        self._stack.is_packed = True


@dataclass(frozen=True, slots=True)
class ExpertNetworks:
    """What ``DeviceOps.run_experts`` takes of a layer; ``spec`` may be a rank's own."""

    spec: ExpertsSpec
    gate_up_proj: StackedLinear
    """[E, 2 I, N], gate rows above up rows"""
    down_proj: StackedLinear
    """[E, N, I]"""

    @property
    def is_packed(self) -> bool:
        """Whether any expert has packed weights."""
        return self.gate_up_proj.is_packed or self.down_proj.is_packed

    def forward(self, expert: int, x: Tensor) -> Tensor:
        """Return the output [T, N] of expert number ``expert`` for ``x`` [T, N]."""
        gate_up = self.gate_up_proj.forward(expert, x)
        if self.spec.limit is None:
            inner = gate_and_mul(gate_up, self.spec.activation)
        else:
            inner = clamped_gate_and_mul(gate_up, self.spec.limit)
        return self.down_proj.forward(expert, inner)
