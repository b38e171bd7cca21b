"""Packs a loaded model for the CPU kernels, layer by layer. Imports no torch.

Each tensor's memory is given back once its packed form is written, so that the model never takes twice its memory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import numpy as np

from ...model_files.spec import RopeSpec
from ...runtime.progress import ProgressLog
from ..cpu_engine.native_engine import NormKind, VectorKind
from ..cpu_engine.packed_model import Contents, PackedLinear, PackedModelWriter, PackedVector
from ..cpu_engine.rotations import rotations
from ..cpu_engine.structs import WeightPart
from ..cpu_engine.weight_packer import LinearKind, LinearPlace, WeightPacker
from ..loader.arrays import Array, as_bits, widen
from ..loader.host_model import (
    HostExperts,
    HostLatentAttention,
    HostLayer,
    HostLinear,
    HostMLP,
    HostStack,
)
from ..loader.host_weights import HostWeights
from ..loader.quantized_blocks import HEAD_NAMES

log = logging.getLogger(__name__)

DENSE = 0
"""``Format::kDense`` of linear.h."""


class ModelPacker:
    """Packs ``weights`` and writes them. They can't be used afterwards. Raises ``ValueError`` and ``OSError``.

    Linear layers take their weights from the blocks that are beside the model, and from the model elsewhere.
    """

    def __init__(self, weights: HostWeights, packer: WeightPacker, writer: PackedModelWriter) -> None:
        self._weights = weights
        self._model = weights.model
        self._packer = packer
        self._writer = writer
        self._step_bytes = 0
        self._linears: list[PackedLinear] = []
        self._norms: list[PackedVector] = []
        self._vectors: list[PackedVector] = []

    def pack(self, key: str, source: str, positions: int) -> Contents:
        """Pack and write all weights, and return the contents to write after them. The model's own weights are freed.

        ``key``: identifies the packed weights. ``source``: path of the model's files. ``positions``: number of
        positions to compute rotations for.
        """
        model, weights = self._model, self._weights
        # The head counts as a layer.
        progress = ProgressLog(log, "packing the weights", len(model.layers) + 1)
        for i, layer in enumerate(model.layers):
            self._pack_layer(i, layer)
            progress.advance(1)
        self._add_norm(NormKind.FINAL, 0, model.norm.scale)
        self._step_bytes += self._pack_weight(LinearPlace(LinearKind.HEAD, 0), model.lm_head, None, HEAD_NAMES[:1])
        embedding = 0 if self._has_table_in_head() else self._writer.add(model.embed_tokens)
        return Contents(
            key=key,
            source=source,
            fingerprint=weights.fingerprint,
            quantization=weights.quantization,
            activations=weights.activations,
            step_bytes=self._step_bytes,
            linears=self._linears,
            norms=self._norms,
            vectors=self._vectors,
            embedding=embedding,
            ropes=[self._add_rotations(rope, positions) for rope in model.spec.ropes],
            positions=positions,
        )

    def _has_table_in_head(self) -> bool:
        """Return whether the head's panels hold the table of embeddings: it is tied, dense, and has all rows."""
        head, model = self._linears[-1], self._model
        return model.spec.tied_head and head.parts == [(model.spec.vocab_size, DENSE)]

    def _pack_layer(self, i: int, layer: HostLayer) -> None:
        attention, mlp = layer.attention, layer.mlp
        if isinstance(attention, HostLatentAttention):
            self._pack_latent(i, attention)
        else:
            self._pack_linear(LinearKind.QKV, i, attention.qkv_proj, "q_proj", "k_proj", "v_proj")
            if attention.sinks is not None:
                self._add_vector(VectorKind.SINKS, i, attention.sinks)
        self._pack_linear(LinearKind.O, i, attention.o_proj, "o_proj")
        if isinstance(mlp, HostExperts):
            self._pack_experts(i, mlp)
        else:
            self._pack_mlp(i, mlp)
        for kind, weight in _norms_of(layer):
            self._add_norm(kind, i, weight)

    def _pack_latent(self, layer: int, attention: HostLatentAttention) -> None:
        first = attention.q_b_proj if attention.q_a_proj is None else attention.q_a_proj
        weight, bias = stacked(first.weight, attention.kv_a_proj.weight), None
        if attention.kv_a_proj.bias is not None:
            # Queries that are projected at once have none.
            above = np.zeros(len(first.weight), np.float32) if first.bias is None else widen(first.bias)
            bias = stacked(above, widen(attention.kv_a_proj.bias))
        first.give_back()
        attention.kv_a_proj.give_back()
        names = ["q_proj" if attention.q_a_proj is None else "q_a_proj", "kv_a_proj"]
        names = [f"layers.{layer}.{name}.weight" for name in names]
        self._step_bytes += self._pack_weight(LinearPlace(LinearKind.QKV, layer), weight, bias, names)
        if attention.q_a_proj is not None:
            self._pack_linear(LinearKind.QB, layer, attention.q_b_proj, "q_b_proj")
        for kind, linear in ((LinearKind.KB, attention.k_b_proj), (LinearKind.VB, attention.v_b_proj)):
            for head, rows in enumerate(np.split(linear.weight, attention.spec.heads)):
                self._step_bytes += self._pack_dense(LinearPlace(kind, layer, head), rows, None)
            linear.give_back()

    def _pack_mlp(self, layer: int, mlp: HostMLP, of: str = "", expert: int = 0) -> None:
        self._pack_linear(LinearKind.GATE_UP, layer, mlp.gate_up_proj, f"{of}gate_proj", f"{of}up_proj", expert=expert)
        self._pack_linear(LinearKind.DOWN, layer, mlp.down_proj, f"{of}down_proj", expert=expert)

    def _pack_experts(self, layer: int, experts: HostExperts) -> None:
        spec, router, bias = experts.spec, experts.router.weight, experts.router.bias
        if experts.shared_gate is not None:
            router = stacked(router, experts.shared_gate)
            bias = None if bias is None else np.pad(bias, (0, 1))
        self._pack_dense(LinearPlace(LinearKind.ROUTER, layer), router, bias)
        if experts.choice_bias is not None:
            self._add_vector(VectorKind.CHOICE_BIAS, layer, experts.choice_bias)
        nbytes = 0
        for kind, stack, parts in (
            (LinearKind.GATE_UP, experts.gate_up_proj, ("gate_proj", "up_proj")),
            (LinearKind.DOWN, experts.down_proj, ("down_proj",)),
        ):
            nbytes += self._pack_stack(kind, layer, stack, parts)
            stack.give_back()
        self._step_bytes += router.nbytes + nbytes * spec.chosen // spec.count
        if experts.shared is not None:
            self._pack_mlp(layer, experts.shared, "shared.", spec.count)

    def _pack_stack(self, kind: LinearKind, layer: int, stack: HostStack, parts: Sequence[str]) -> int:
        """Pack and write the weight of each expert; return the bytes that they take.

        ``kind``: which of the experts' linear layers ``stack`` is. ``parts``: names of the projections that are fused
        in it.
        """
        nbytes = 0
        for i, weight in enumerate(stack.weight):
            names = [f"layers.{layer}.experts.{i}.{part}.weight" for part in parts]
            bias = None if stack.bias is None else stack.bias[i]
            nbytes += self._pack_weight(LinearPlace(kind, layer, i), weight, bias, names)
        return nbytes

    def _pack_linear(self, kind: LinearKind, layer: int, linear: HostLinear, *parts: str, expert: int = 0) -> None:
        names = [f"layers.{layer}.{part}.weight" for part in parts]
        place = LinearPlace(kind, layer, expert)
        self._step_bytes += self._pack_weight(place, linear.weight, linear.bias, names)
        linear.give_back()

    def _pack_weight(self, place: LinearPlace, weight: Array, bias: Array | None, names: Sequence[str]) -> int:
        """Pack and write a weight, or the quantised blocks that stand for it; return the bytes that it takes.

        ``place``: the linear layer that the weight is of. ``names``: the engine's names of the weights that are fused
        in it, by which blocks are found.
        """
        blocks = self._weights.blocks
        found = None if blocks is None else blocks.find(names, weight)
        if found is None:
            return self._pack_dense(place, weight, bias)
        parts = [WeightPart(part.blocks.ctypes.data, len(part.blocks), int(part.format)) for part in found]
        return self._add_linear(place, parts, bias)

    def _pack_dense(self, place: LinearPlace, weight: Array, bias: Array | None) -> int:
        rows = np.ascontiguousarray(weight)
        return self._add_linear(place, [WeightPart(rows.ctypes.data, len(rows), DENSE)], bias)

    def _add_linear(self, place: LinearPlace, parts: Sequence[WeightPart], bias: Array | None) -> int:
        floats = None if bias is None else np.ascontiguousarray(widen(bias))
        packed = self._packer.pack(place, parts, floats)
        panels = self._writer.add(packed.panels)
        packed_bias = 0 if packed.bias is None else self._writer.add(packed.bias)
        described = [(part.rows, part.format) for part in parts]
        self._linears.append(PackedLinear(int(place.kind), place.layer, place.expert, described, panels, packed_bias))
        return packed.panels.nbytes

    def _add_norm(self, kind: NormKind, layer: int, weight: Array) -> None:
        self._norms.append(PackedVector(int(kind), layer, self._writer.add(widen(weight))))

    def _add_vector(self, kind: VectorKind, layer: int, values: Array) -> None:
        self._vectors.append(PackedVector(int(kind), layer, self._writer.add(widen(values))))

    def _add_rotations(self, rope: RopeSpec, positions: int) -> tuple[int, int]:
        """Write the cosines and sines [positions, rotated_dim / 2] of ``rope``; return their offsets in the file."""
        cosines, sines = rotations(rope, self._model.spec.rotated_dim, positions, self._packer.team)
        return self._writer.add(cosines), self._writer.add(sines)


def stacked(above: Array, below: Array) -> Array:
    """Return two arrays of one type, one below the other."""
    return np.concatenate((as_bits(above), as_bits(below))).view(above.dtype)


def _norms_of(layer: HostLayer) -> Iterator[tuple[NormKind, Array]]:
    attention = layer.attention
    q_norm, k_norm = (
        (attention.q_a_norm, attention.kv_a_norm)
        if isinstance(attention, HostLatentAttention)
        else (attention.q_norm, attention.k_norm)
    )
    for kind, norm in (
        (NormKind.BEFORE_ATTENTION, layer.before_attention),
        (NormKind.AFTER_ATTENTION, layer.after_attention),
        (NormKind.BEFORE_MLP, layer.before_mlp),
        (NormKind.AFTER_MLP, layer.after_mlp),
        (NormKind.Q, q_norm),
        (NormKind.K, k_norm),
    ):
        if norm is not None:
            yield kind, norm.scale
