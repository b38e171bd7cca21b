"""Lowers a ``ModelSpec`` to the fused operations that the CPU engine walks (``layer_ops.h``), or says what it lacks.

Every field of a spec that an engine computes by is named here: a field that is not, and is set, is refused by its name,
so that a new one in ``spec.py`` is served by the torch engine until this file knows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import Array
from dataclasses import MISSING, Field, fields
from enum import IntEnum
from typing import NamedTuple

import torch

from ...model_files.sharding import Slice
from ...model_files.spec import (
    Activation,
    AttentionSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
    QKNorm,
)
from .library import NATIVE_DTYPES, NATIVE_KV_DTYPES
from .structs import AddProduct, Attend, GateUp, LayerOps, ModelOps, NormOp, ProjectQKV

HEAD_DIM_MULTIPLE = 16
LARGEST = 2**31 - 1


class NativeActivation(IntEnum):
    """``Activation`` of layer_ops.h."""

    SILU = 0
    GELU = 1
    GELU_TANH = 2


class NativeQKNorm(IntEnum):
    """``QKNorm`` of layer_ops.h."""

    NONE = 0
    HEAD = 1
    ALL = 2


ACTIVATIONS = {
    Activation.SILU: NativeActivation.SILU,
    Activation.GELU: NativeActivation.GELU,
    Activation.GELU_TANH: NativeActivation.GELU_TANH,
}
QK_NORMS = {None: NativeQKNorm.NONE, QKNorm.HEAD: NativeQKNorm.HEAD, QKNorm.ALL: NativeQKNorm.ALL}

# Of ModelSpec also what loaders and those who make the tables of rotations see to.
COMPUTED: dict[type, tuple[str, ...]] = {
    ModelSpec: (
        *("family", "vocab_size", "hidden_size", "layers", "final_norm", "ropes", "context_length", "tied_head"),
        *("embedding_scale", "logit_scale", "logit_softcap", "tensors"),
    ),
    LayerSpec: (
        *("attention", "mlp", "before_attention", "before_mlp", "after_attention", "after_mlp"),
        "residual_scale",
    ),
    AttentionSpec: (
        *("heads", "kv_heads", "head_dim", "scale", "rope", "window", "softcap", "qkv_bias", "o_bias"),
        *("qk_norm", "qk_norm_spec"),
    ),
    MLPSpec: ("inner", "activation", "bias"),
    NormSpec: ("eps", "offset"),
}


class Lowered(NamedTuple):
    """A model as the engine takes it: what layers share, and the operations of each."""

    model: ModelOps
    layers: Array[LayerOps]


def refusal(spec: ModelSpec, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
    """Why the kernels can't run this model; None if they can."""
    if dtype not in NATIVE_DTYPES or kv_dtype not in NATIVE_KV_DTYPES:
        return f"they compute in bfloat16 and float32, not in {dtype} over a KV pool of {kv_dtype}"
    if spec.head_dim % HEAD_DIM_MULTIPLE:
        return f"they need a head_dim that is a multiple of {HEAD_DIM_MULTIPLE}, not {spec.head_dim}"
    if spec.hidden_size % 2 or any(getattr(layer.mlp, "inner", 0) % 2 for layer in spec.layers):
        return "they need even hidden and intermediate sizes"
    lacking = next(_lacking(spec), None)
    return None if lacking is None else f"they do not compute {lacking}"


def lower(spec: ModelSpec, dtype: torch.dtype, head: Slice | None = None) -> Lowered:
    """The operations of ``spec``, which ``refusal`` has let pass, over activations of ``dtype``.

    ``head``: the rows of the head that this rank has; None: all.
    """
    attention = spec.layers[0].attention
    model = ModelOps(
        spec.num_layers,
        spec.hidden_size,
        attention.heads,
        attention.kv_heads,
        attention.head_dim,
        spec.vocab_size,
        0 if head is None else head.begin,
        spec.vocab_size if head is None else head.size,
        _norm(spec.final_norm),
        torch.tensor(spec.embedding_scale, dtype=dtype).item(),
        spec.logit_scale,
        spec.logit_softcap or 0.0,
    )
    return Lowered(model, (LayerOps * spec.num_layers)(*map(_layer, spec.layers)))


def _layer(spec: LayerSpec) -> LayerOps:
    attention = spec.attention
    eps = 0.0 if attention.qk_norm_spec is None else attention.qk_norm_spec.eps
    rope = -1 if attention.rope is None else attention.rope
    return LayerOps(
        ProjectQKV(_norm(spec.before_attention), QK_NORMS[attention.qk_norm], eps, rope),
        Attend(attention.scale, attention.softcap or 0.0, min(attention.window or 0, LARGEST)),
        AddProduct(_norm(spec.after_attention), spec.residual_scale),
        GateUp(_norm(spec.before_mlp), ACTIVATIONS[spec.mlp.activation], spec.mlp.inner),
        AddProduct(_norm(spec.after_mlp), spec.residual_scale),
    )


def _norm(spec: NormSpec | None) -> NormOp:
    return NormOp(0, 0.0) if spec is None else NormOp(1, spec.eps)


def _lacking(spec: ModelSpec) -> Iterator[str]:
    """The places of a spec, and what stands there, that the engine has no operation for."""
    yield from _unknown("", spec, ModelSpec)
    yield from _unknown("final_norm.", spec.final_norm, NormSpec)
    first = spec.layers[0].attention
    for i, layer in enumerate(spec.layers):
        path, attention, mlp = f"layers[{i}].", layer.attention, layer.mlp
        yield from _unknown(path, layer, LayerSpec)
        for name in ("before_attention", "after_attention", "before_mlp", "after_mlp"):
            if (norm := getattr(layer, name)) is not None:
                yield from _unknown(f"{path}{name}.", norm, NormSpec)
        yield from _unknown(f"{path}mlp.", mlp, MLPSpec)
        if mlp.activation not in ACTIVATIONS:
            yield f"{path}mlp.activation: {mlp.activation}"
        yield from _unknown(f"{path}attention.", attention, AttentionSpec)
        if attention.heads != first.heads:
            yield f"{path}attention.heads: {attention.heads} beside {first.heads} in other layers"
        if attention.qk_norm not in QK_NORMS:
            yield f"{path}attention.qk_norm: {attention.qk_norm}"
        if attention.qk_norm is not None:
            if attention.qk_norm_spec is None:
                yield f"{path}attention.qk_norm_spec: None beside qk_norm {attention.qk_norm}"
            else:
                yield from _unknown(f"{path}attention.qk_norm_spec.", attention.qk_norm_spec, NormSpec)
        if attention.rope is not None and not 0 <= attention.rope < len(spec.ropes):
            yield f"{path}attention.rope: {attention.rope} of {len(spec.ropes)}"


def _unknown(path: str, part: object, kind: type) -> Iterator[str]:
    """Where ``part`` is no ``kind``, or is set to something that this file does not know."""
    if type(part) is not kind:
        yield f"{path.removesuffix('.')}: {type(part).__name__}"
        return
    for one in fields(part):  # type: ignore[arg-type]  # ``kind`` is a dataclass
        value = getattr(part, one.name)
        if one.name not in COMPUTED[kind] and value != _default(one):
            yield f"{path}{one.name}: {value}"


def _default(one: Field[object]) -> object:
    if one.default_factory is not MISSING:
        return one.default_factory()
    return one.default
