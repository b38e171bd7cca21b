"""Random mixtures of experts for the CPU engine, and the same written out in float64.

Shapes: T tokens, N hidden size, E experts, C chosen of them, I inner size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import gguf
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType
from torch import Tensor

from pdserve.model_files.spec import Activation, ExpertScoring, ExpertsSpec, GroupScore, MLPSpec
from pdserve.model_runner.cpu_engine.native_engine import VectorKind
from pdserve.model_runner.cpu_engine.structs import WeightPart
from pdserve.model_runner.cpu_engine.weight_packer import LinearKind
from pdserve.model_runner.loader.quantized_blocks import FORMATS
from pdserve.model_runner.loader.random_blocks import random_blocks

from .native_weights import NativeWeights

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
}
Kinds = tuple[GGMLQuantizationType | None, GGMLQuantizationType | None]
"""Kinds of the blocks of gate_up and down. None means dense."""
Rounding = Callable[[Tensor], Tensor]
"""What becomes of activations before they are multiplied with quantised weights."""


class Weight(NamedTuple):
    """``values`` [N, K]; where they are those of ``blocks``, of ``kind``, the engine gets these."""

    values: Tensor
    bias: Tensor | None = None
    blocks: npt.NDArray[np.uint8] | None = None
    kind: GGMLQuantizationType | None = None

    def part(self) -> WeightPart:
        """Return the weight as the engine takes it; it points to this object's memory."""
        if self.blocks is None or self.kind is None:
            return WeightPart(self.values.data_ptr(), len(self.values), 0)
        return WeightPart(self.blocks.ctypes.data, len(self.blocks), FORMATS[self.kind])

    def multiply(self, x: Tensor, rounding: Rounding) -> Tensor:
        """Multiply ``x`` by the weight in float64."""
        x = x if self.blocks is None else rounding(x)
        return F.linear(x, self.values.double(), None if self.bias is None else self.bias.double())


class Network(NamedTuple):
    """An expert. ``gate_up``: [2 I, N], the gate above."""

    gate_up: Weight
    down: Weight


class Experts(NamedTuple):
    """The weights of one layer's ``spec``."""

    spec: ExpertsSpec
    router: Weight
    choice_bias: Tensor | None
    networks: list[Network]
    shared: Network | None
    shared_gate: Tensor | None


class Choice(NamedTuple):
    """``experts`` and ``weights`` are [T, C]. ``margin``: [T], by how much the last one chosen was ahead."""

    experts: Tensor
    weights: Tensor
    margin: Tensor


def draw_experts(
    spec: ExpertsSpec,
    hidden: int,
    generator: torch.Generator,
    dtype: torch.dtype,
    kinds: Kinds = (None, None),
) -> Experts:
    """Dense ones of ``dtype``."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def weight(n: int, k: int, bias: bool, kind: GGMLQuantizationType | None) -> Weight:
        found_bias = draw(n) * 0.3 if bias else None
        if kind is None:
            return Weight((draw(n, k) / math.sqrt(k)).to(dtype), found_bias)
        seed = int(torch.randint(2**31, (1,), generator=generator))
        blocks = random_blocks(kind, n, k, np.random.default_rng(seed), k**-0.5)
        return Weight(torch.from_numpy(gguf.dequantize(blocks, kind)), found_bias, blocks, kind)

    def network(inner: int, bias: bool) -> Network:
        return Network(weight(2 * inner, hidden, bias, kinds[0]), weight(hidden, inner, bias, kinds[1]))

    router = Weight(draw(spec.count, hidden) * 2 / math.sqrt(hidden), draw(spec.count) if spec.router_bias else None)
    return Experts(
        spec,
        router,
        draw(spec.count) * 0.3 if spec.choice_bias else None,
        [network(spec.inner, spec.bias) for _ in range(spec.count)],
        None if spec.shared is None else network(spec.shared.inner, spec.shared.bias),
        draw(1, hidden) / math.sqrt(hidden) if spec.shared_gate else None,
    )


def set_experts(engine: NativeWeights, layer: int, experts: Experts) -> None:
    """Give the engine all of them."""
    spec, router = experts.spec, experts.router
    rows, bias = [router.values], router.bias
    if experts.shared_gate is not None:
        rows.append(experts.shared_gate)
        bias = None if bias is None else F.pad(bias, (0, 1))
    table = torch.cat(rows)
    engine.set_linear(LinearKind.ROUTER, layer, [WeightPart(table.data_ptr(), len(table), 0)], bias)
    if experts.choice_bias is not None:
        engine.set_vector(VectorKind.CHOICE_BIAS, layer, experts.choice_bias)
    shared = [] if experts.shared is None else [(spec.count, experts.shared)]
    for i, network in (*enumerate(experts.networks), *shared):
        for kind, weight in ((LinearKind.GATE_UP, network.gate_up), (LinearKind.DOWN, network.down)):
            engine.set_linear(kind, layer, [weight.part()], weight.bias, i)


def choose(spec: ExpertsSpec, logits: Tensor, choice_bias: Tensor | None) -> Choice:
    """Choose experts as ``ExpertsSpec`` says, in the type of ``logits`` [T, E]."""
    scores = logits.softmax(-1) if spec.scoring == ExpertScoring.SOFTMAX else logits.sigmoid()
    ranking = scores if choice_bias is None else scores + choice_bias.to(scores.dtype)
    margins = []
    if spec.groups_chosen < spec.groups:
        by_group = ranking.unflatten(-1, (spec.groups, -1))
        count = 1 if spec.group_score == GroupScore.LARGEST else min(2, by_group.shape[-1])
        worth = by_group.topk(count, -1).values.sum(-1)
        kept, margin = _largest(worth, spec.groups_chosen)
        margins.append(margin)
        mask = torch.zeros_like(worth, dtype=torch.bool).scatter(-1, kept, True)
        ranking = by_group.masked_fill(~mask[..., None], -torch.inf).flatten(-2)
    experts, margin = _largest(ranking, spec.chosen)
    weights = scores.gather(-1, experts)
    if spec.normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return Choice(experts, weights * spec.weight_scale, torch.stack([*margins, margin]).amin(0))


def _largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the indices of the largest values along the last axis, and their lead over the rest.

    Of equal ones the first wins.
    """
    order = torch.sort(values, dim=-1, descending=True, stable=True)
    if count == values.shape[-1]:
        return order.indices, torch.full(values.shape[:-1], torch.inf, dtype=values.dtype)
    return order.indices[..., :count], order.values[..., count - 1] - order.values[..., count]


def run_experts(experts: Experts, x: Tensor, rounding: Rounding = lambda x: x) -> tuple[Tensor, Choice]:
    """Run ``experts`` on ``x`` [T, N] in float64. Returns the result and the choice of experts."""
    spec, x = experts.spec, x.double()
    choice = choose(spec, experts.router.multiply(x, rounding), experts.choice_bias)
    out = torch.zeros_like(x)
    for i, network in enumerate(experts.networks):
        tokens, place = torch.nonzero(choice.experts == i, as_tuple=True)
        if len(tokens) == 0:
            continue
        own = _run_network(network, spec.activation, spec.limit, x[tokens], rounding)
        out.index_add_(0, tokens, own * choice.weights[tokens, place][:, None])
    if experts.shared is not None and spec.shared is not None:
        own = _run_network(experts.shared, spec.shared.activation, None, x, rounding)
        if experts.shared_gate is not None:
            own = own * torch.sigmoid(x @ experts.shared_gate.double().T)
        out = out + own
    return out, choice


def _run_network(
    network: Network, activation: Activation, limit: float | None, x: Tensor, rounding: Rounding
) -> Tensor:
    gate, up = network.gate_up.multiply(x, rounding).chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    else:
        inner = ACTIVATIONS[activation](gate) * up
    return network.down.multiply(inner, rounding)


def any_spec(seed: int) -> ExpertsSpec:
    """Draw a spec with any features together, and sizes that are no multiples of anything."""
    rng = np.random.default_rng(seed)
    groups = int(rng.integers(1, 5))
    count = groups * int(rng.integers(1, 8))
    groups_chosen = int(rng.integers(1, groups + 1))
    shared = MLPSpec(inner=2 * int(rng.integers(1, 60)), bias=bool(rng.integers(2))) if rng.integers(2) else None
    return ExpertsSpec(
        count=count,
        chosen=int(rng.integers(1, min(8, count // groups * groups_chosen) + 1)),
        inner=2 * int(rng.integers(1, 60)),
        activation=list(Activation)[rng.integers(3)],
        bias=bool(rng.integers(2)),
        limit=[None, 1.5][rng.integers(2)],
        scoring=list(ExpertScoring)[rng.integers(2)],
        normalised=bool(rng.integers(2)),
        weight_scale=float(rng.choice([1.0, 2.5])),
        router_bias=bool(rng.integers(2)),
        choice_bias=bool(rng.integers(2)),
        groups=groups,
        groups_chosen=groups_chosen,
        group_score=list(GroupScore)[rng.integers(2)],
        shared=shared,
        shared_gate=shared is not None and bool(rng.integers(2)),
    )
