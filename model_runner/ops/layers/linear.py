"""Linear layers, single and fused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from ..packed.weights import PackedWeight
from ..reference import linear

Product = Callable[[Tensor, PackedWeight, Tensor | None], Tensor]
"""Product of ``x`` [T, in] (elements side by side) with a packed weight and a bias: [T, out]."""


class Linear:
    """``x`` [T, in] → [T, sum(outs)]: several projections of one input, fused into one weight.

    The weight is of floats, or ``packed``: then ``keep_packed`` comes before anyone asks for ``weight``, and
    ``use_packed`` before ``forward``.
    """

    packed: PackedWeight | None = None

    def __init__(
        self, in_features: int, outs: Sequence[int], *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.in_features = in_features
        self.outs = list(outs)
        self._dtype, self._device = dtype, device
        self._product: Product | None = None
        self.bias = torch.empty(sum(outs), dtype=dtype, device=device) if bias else None

    @cached_property
    def weight(self) -> Tensor:
        """The weight, [sum(outs), in], uninitialised until loaded; allocated at the first use.

        If a packed weight replaces it, only its shape and type mean something.
        """
        return torch.empty(sum(self.outs), self.in_features, dtype=self._dtype, device=self._device)

    def keep_packed(self) -> None:
        """Replace the floating-point weight by one without memory, because ``use_packed`` will bring a packed one."""
        self.weight = torch.empty(sum(self.outs), self.in_features, dtype=self._dtype, device="meta")

    def use_packed(self, weight: PackedWeight, product: Product) -> None:
        """Multiply with the packed ``weight`` by ``product`` from now on, instead of the floating-point weight."""
        self.packed, self._product = weight, product

    def forward(self, x: Tensor) -> Tensor:
        """Return all projections of ``x`` [T, in], side by side: [T, sum(outs)]."""
        if self.packed is None or self._product is None:
            return linear(x, self.weight, self.bias)
        return self._product(x, self.packed, self.bias)

    def weights(self, *names: str) -> dict[str, Tensor]:
        """Return views of the fused weight and bias, by the names of the checkpoint's separate projections.

        ``names``: the projections' names, in the order in which they are stacked. Writing to a view loads that part.
        """
        views = {f"{name}.weight": part for name, part in zip(names, torch.split(self.weight, self.outs), strict=True)}
        if self.bias is not None:
            views |= {f"{name}.bias": part for name, part in zip(names, torch.split(self.bias, self.outs), strict=True)}
        return views


Linears = Mapping[tuple[str, ...], Linear]
"""Layers by the names of what each projects to."""


def weights_of(linears: Linears) -> dict[str, Tensor]:
    """Return the weight tensors of all ``linears`` as views, by name."""
    return {name: view for names, linear in linears.items() for name, view in linear.weights(*names).items()}
