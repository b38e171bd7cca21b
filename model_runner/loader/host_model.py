"""A model's weights in NumPy arrays, for the CPU kernels to be packed from. Imports no torch, and computes nothing.

The torch model (``models/decoder.py``) has the same weights under the same names, in the same order. Projections of one
input lie in one array, one below the other, as the engine multiplies with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ...model_files.sharding import Slice
from ...model_files.spec import (
    AttentionSpec,
    ExpertsSpec,
    LayerSpec,
    MLASpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
    QKNorm,
)
from ...model_files.tensor_names import EMBEDDING, HEAD, NORM
from .arrays import FLOAT32, Array, float_type

DType = np.dtype[Any]
Make = Callable[[tuple[int, ...], DType], Array]
"""Makes the array of a weight, of a shape and a type."""


def without_memory(shape: tuple[int, ...], dtype: DType) -> Array:
    """Make an array that has a shape and takes no memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)


class HostLinear:
    """One or several projections of one input: a weight [sum(outs), inputs], and a bias [sum(outs)] or None."""

    def __init__(self, make: Make, inputs: int, outs: Sequence[int], dtype: DType, *, bias: bool) -> None:
        self._outs = outs
        self.weight = make((sum(outs), inputs), dtype)
        self.bias = make((sum(outs),), dtype) if bias else None

    def weights(self, *names: str) -> dict[str, Array]:
        """Return views of the parts by name: ``name.weight``, and ``name.bias`` if there is one, for each projection.

        ``names``: those of the projections, from the top.
        """
        found = {f"{name}.weight": part for name, part in zip(names, _split(self.weight, self._outs), strict=True)}
        if self.bias is not None:
            found |= {f"{name}.bias": part for name, part in zip(names, _split(self.bias, self._outs), strict=True)}
        return found

    def give_back(self) -> None:
        """Free the weight, after it was packed."""
        self.weight = self.weight[:0].copy()


class HostStack:
    """A linear layer of each expert: weights [experts, sum(outs), inputs], and biases [experts, sum(outs)] or None."""

    def __init__(self, make: Make, experts: int, inputs: int, outs: Sequence[int], dtype: DType, *, bias: bool) -> None:
        self._outs = outs
        self.weight = make((experts, sum(outs), inputs), dtype)
        self.bias = make((experts, sum(outs)), dtype) if bias else None

    def weights(self, prefix: str, *names: str) -> dict[str, Array]:
        """Return views of each expert's parts by name: ``prefix.7.name.weight``, and ``.bias`` if there are biases.

        ``names``: those of the projections, from the top.
        """
        found: dict[str, Array] = {}
        for kind, stack in (("weight", self.weight), ("bias", self.bias)):
            if stack is None:
                continue
            parts = [_split(one, self._outs) for one in stack]
            for i, name in enumerate(names):
                found |= {f"{prefix}.{expert}.{name}.{kind}": part[i] for expert, part in enumerate(parts)}
        return found

    def give_back(self) -> None:
        """Free the weights of all experts, after they were packed."""
        self.weight = self.weight[:0].copy()


class HostNorm:
    """The weight of a norm, float32 [size], as the checkpoint has it: without the family's offset."""

    def __init__(self, make: Make, size: int, spec: NormSpec) -> None:
        self._offset = spec.offset
        self.weight = make((size,), FLOAT32)

    @property
    def scale(self) -> Array:
        """Factors that normalised elements are multiplied by: the weight plus the family's offset."""
        return self.weight + np.float32(self._offset) if self._offset else self.weight


class HostAttention:
    """Grouped-query attention of one layer."""

    def __init__(self, make: Make, spec: AttentionSpec, hidden: int, dtype: DType) -> None:
        q_size, kv_size = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.qkv_proj = HostLinear(make, hidden, (q_size, kv_size, kv_size), dtype, bias=spec.qkv_bias)
        self.o_proj = HostLinear(make, q_size, (hidden,), dtype, bias=spec.o_bias)
        self.q_norm = self.k_norm = None
        if spec.qk_norm is not None and spec.qk_norm_spec is not None:
            q_size, kv_size = (q_size, kv_size) if spec.qk_norm == QKNorm.ALL else (spec.head_dim, spec.head_dim)
            self.q_norm = HostNorm(make, q_size, spec.qk_norm_spec)
            self.k_norm = HostNorm(make, kv_size, spec.qk_norm_spec)
        self.sinks = make((spec.heads,), FLOAT32) if spec.sinks else None

    def weights(self, prefix: str) -> dict[str, Array]:
        """Return views of the layer's weights, by names that begin with ``prefix``."""
        qkv = (f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj")
        found = self.qkv_proj.weights(*qkv) | self.o_proj.weights(f"{prefix}.o_proj")
        if self.q_norm is not None and self.k_norm is not None:
            found |= {f"{prefix}.q_norm.weight": self.q_norm.weight, f"{prefix}.k_norm.weight": self.k_norm.weight}
        if self.sinks is not None:
            found[f"{prefix}.sinks"] = self.sinks
        return found


class HostLatentAttention:
    """Latent attention of one layer. ``q_a_proj`` and ``q_a_norm`` are None if queries are projected at once."""

    def __init__(self, make: Make, spec: MLASpec, hidden: int, dtype: DType) -> None:
        def linear(inputs: int, outputs: int, *, bias: bool = False) -> HostLinear:
            return HostLinear(make, inputs, (outputs,), dtype, bias=bias)

        self.spec = spec
        rank = spec.q_lora_rank
        self.q_a_proj = None if rank is None else linear(hidden, rank, bias=spec.a_bias)
        self.q_a_norm = None if rank is None else HostNorm(make, rank, spec.norm)
        self.q_b_proj = linear(rank or hidden, spec.heads * spec.qk_head_dim)
        self.kv_a_proj = linear(hidden, spec.head_dim, bias=spec.a_bias)
        self.kv_a_norm = HostNorm(make, spec.kv_lora_rank, spec.norm)
        self.k_b_proj = linear(spec.qk_nope_head_dim, spec.heads * spec.kv_lora_rank)
        self.v_b_proj = linear(spec.kv_lora_rank, spec.heads * spec.v_head_dim)
        self.o_proj = linear(spec.heads * spec.v_head_dim, hidden, bias=spec.o_bias)

    def weights(self, prefix: str) -> dict[str, Array]:
        """Return views of the layer's weights, by names that begin with ``prefix``."""
        linears = {"kv_a_proj": self.kv_a_proj, "o_proj": self.o_proj}
        if self.q_a_proj is None:
            linears["q_proj"] = self.q_b_proj
        else:
            linears |= {"q_a_proj": self.q_a_proj, "q_b_proj": self.q_b_proj}
        linears |= {"k_b_proj": self.k_b_proj, "v_b_proj": self.v_b_proj}
        found: dict[str, Array] = {}
        for name, linear in linears.items():
            found |= linear.weights(f"{prefix}.{name}")
        found[f"{prefix}.kv_a_norm.weight"] = self.kv_a_norm.weight
        if self.q_a_norm is not None:
            found[f"{prefix}.q_a_norm.weight"] = self.q_a_norm.weight
        return found


class HostMLP:
    """A gated feed-forward network."""

    def __init__(self, make: Make, spec: MLPSpec, hidden: int, dtype: DType) -> None:
        self.gate_up_proj = HostLinear(make, hidden, (spec.inner, spec.inner), dtype, bias=spec.bias)
        self.down_proj = HostLinear(make, spec.inner, (hidden,), dtype, bias=spec.bias)

    def weights(self, prefix: str) -> dict[str, Array]:
        """Return views of the network's weights, by names that begin with ``prefix``."""
        up = self.gate_up_proj.weights(f"{prefix}.gate_proj", f"{prefix}.up_proj")
        return up | self.down_proj.weights(f"{prefix}.down_proj")


class HostExperts:
    """A mixture of experts. ``router``, ``choice_bias`` and ``shared_gate`` are float32."""

    def __init__(self, make: Make, spec: ExpertsSpec, hidden: int, dtype: DType) -> None:
        count, inner = spec.count, spec.inner
        self.spec = spec
        self.router = HostLinear(make, hidden, (count,), FLOAT32, bias=spec.router_bias)
        self.choice_bias = make((count,), FLOAT32) if spec.choice_bias else None
        self.gate_up_proj = HostStack(make, count, hidden, (inner, inner), dtype, bias=spec.bias)
        self.down_proj = HostStack(make, count, inner, (hidden,), dtype, bias=spec.bias)
        self.shared = None if spec.shared is None else HostMLP(make, spec.shared, hidden, dtype)
        self.shared_gate = make((1, hidden), FLOAT32) if spec.shared_gate else None

    def weights(self, prefix: str) -> dict[str, Array]:
        """Return views of the network's weights, by names that begin with ``prefix``."""
        found = self.router.weights(f"{prefix}.router")
        found |= self.gate_up_proj.weights(f"{prefix}.experts", "gate_proj", "up_proj")
        found |= self.down_proj.weights(f"{prefix}.experts", "down_proj")
        if self.choice_bias is not None:
            found[f"{prefix}.router.choice_bias"] = self.choice_bias
        if self.shared is not None:
            found |= self.shared.weights(f"{prefix}.shared")
        if self.shared_gate is not None:
            found[f"{prefix}.shared_gate.weight"] = self.shared_gate
        return found


class HostLayer:
    """One decoder layer. Its norms are None where the family has none."""

    def __init__(self, make: Make, spec: LayerSpec, hidden: int, dtype: DType) -> None:
        def norm(norm_spec: NormSpec | None) -> HostNorm | None:
            return None if norm_spec is None else HostNorm(make, hidden, norm_spec)

        self.before_attention, self.after_attention = norm(spec.before_attention), norm(spec.after_attention)
        self.before_mlp, self.after_mlp = norm(spec.before_mlp), norm(spec.after_mlp)
        self.attention: HostAttention | HostLatentAttention
        if isinstance(spec.attention, MLASpec):
            self.attention = HostLatentAttention(make, spec.attention, hidden, dtype)
        else:
            self.attention = HostAttention(make, spec.attention, hidden, dtype)
        self.mlp: HostMLP | HostExperts
        if isinstance(spec.mlp, ExpertsSpec):
            self.mlp = HostExperts(make, spec.mlp, hidden, dtype)
        else:
            self.mlp = HostMLP(make, spec.mlp, hidden, dtype)

    def weights(self, prefix: str) -> dict[str, Array]:
        """Return views of the layer's weights, by names that begin with ``prefix``."""
        norms = {f"{prefix}.{name}.weight": norm.weight for name, norm in self._norms() if norm is not None}
        return norms | self.attention.weights(prefix) | self.mlp.weights(prefix)

    def _norms(self) -> Iterator[tuple[str, HostNorm | None]]:
        yield "before_attention", self.before_attention
        yield "after_attention", self.after_attention
        yield "before_mlp", self.before_mlp
        yield "after_mlp", self.after_mlp


class HostModel:
    """All weights of a model, or of a rank's part of it. They are uninitialised until ``weights()`` were filled."""

    def __init__(self, spec: ModelSpec, dtype: str, vocab: Slice | None = None, make: Make = np.empty) -> None:
        """Make the arrays of the model ``spec`` by ``make``.

        ``dtype``: name of the type of most weights. ``vocab``: rows of the LM head that this rank has; None: all.
        """
        self.spec = spec
        kind, hidden = float_type(dtype), spec.hidden_size
        self.embed_tokens = make((spec.vocab_size, hidden), kind)
        self.layers = [HostLayer(make, layer, hidden, kind) for layer in spec.layers]
        self.norm = HostNorm(make, hidden, spec.final_norm)
        rows = spec.vocab_size if vocab is None else vocab.size
        table = self.embed_tokens if spec.tied_head else None
        self.lm_head = make((rows, hidden), kind) if table is None else table[_rows_of(vocab)]

    def weights(self) -> dict[str, Array]:
        """Return views of all weights by the engine's names, in the order of the torch model's.

        A tied head is left out, as it is the table of embeddings.
        """
        found = {EMBEDDING: self.embed_tokens, NORM: self.norm.weight}
        for i, layer in enumerate(self.layers):
            found |= layer.weights(f"layers.{i}")
        if not self.spec.tied_head:
            found[HEAD] = self.lm_head
        return found


def weight_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's weights by the engine's names."""
    return {name: view.shape for name, view in HostModel(spec, "float32", make=without_memory).weights().items()}


def _rows_of(vocab: Slice | None) -> slice:
    return slice(None) if vocab is None else slice(vocab.begin, vocab.end)


def _split(values: Array, sizes: Sequence[int]) -> list[Array]:
    """Return views of ``values``, cut by rows into parts of these sizes."""
    parts, begin = [], 0
    for size in sizes:
        parts.append(values[begin : begin + size])
        begin += size
    return parts
