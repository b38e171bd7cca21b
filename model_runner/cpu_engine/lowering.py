"""Lowers a ``ModelSpec`` to the fused operations that the CPU engine runs (``layer_ops.h``), or says what it lacks.

Every field of a spec that the engine computes by is named here. A field that is set and not named is refused by its
name. So the torch engine serves a new field of ``spec.py`` until this file knows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import Array
from dataclasses import MISSING, Field, fields, replace
from enum import IntEnum
from typing import NamedTuple

from ...model_files.sharding import Slice
from ...model_files.spec import (
    Activation,
    AttentionSpec,
    ExpertScoring,
    ExpertsSpec,
    GroupScore,
    LayerSpec,
    MLASpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
    QKNorm,
)
from ..dtypes import DType, dtype_name, round_to
from .library import NATIVE_DTYPES, NATIVE_KV_DTYPES, ActivationDType
from .structs import AddProduct, Attend, ExpertsOp, GateUp, LatentOp, LayerOps, ModelOps, NormOp, ProjectQKV

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


class NativeScoring(IntEnum):
    """``ExpertScoring`` of layer_ops.h."""

    SOFTMAX = 0
    SIGMOID = 1


class NativeGroupScore(IntEnum):
    """``GroupScore`` of layer_ops.h."""

    LARGEST = 0
    TWO_LARGEST = 1


ACTIVATIONS = {
    Activation.SILU: NativeActivation.SILU,
    Activation.GELU: NativeActivation.GELU,
    Activation.GELU_TANH: NativeActivation.GELU_TANH,
}
SCORINGS = {ExpertScoring.SOFTMAX: NativeScoring.SOFTMAX, ExpertScoring.SIGMOID: NativeScoring.SIGMOID}
GROUP_SCORES = {GroupScore.LARGEST: NativeGroupScore.LARGEST, GroupScore.TWO_LARGEST: NativeGroupScore.TWO_LARGEST}
QK_NORMS = {None: NativeQKNorm.NONE, QKNorm.HEAD: NativeQKNorm.HEAD, QKNorm.ALL: NativeQKNorm.ALL}

# Fields of each spec that the engine, the loaders or the tables of rotations compute by.
COMPUTED: dict[type, tuple[str, ...]] = {
    ModelSpec: (
        *("family", "vocab_size", "hidden_size", "layers", "final_norm", "ropes", "context_length", "tied_head"),
        *("embedding_scale", "logit_scale", "logit_softcap", "tensors", "draft_layers"),
    ),
    LayerSpec: (
        *("attention", "mlp", "before_attention", "before_mlp", "after_attention", "after_mlp"),
        "residual_scale",
    ),
    AttentionSpec: (
        *("heads", "kv_heads", "head_dim", "scale", "rope", "window", "softcap", "qkv_bias", "o_bias"),
        *("qk_norm", "qk_norm_spec", "sinks"),
    ),
    MLASpec: (
        *("heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "scale"),
        *("norm", "rope", "a_bias", "o_bias"),
    ),
    MLPSpec: ("inner", "activation", "bias"),
    ExpertsSpec: (
        *("count", "chosen", "inner", "activation", "bias", "limit", "scoring", "normalised", "weight_scale"),
        *("router_bias", "choice_bias", "groups", "groups_chosen", "group_score", "shared", "shared_gate"),
    ),
    NormSpec: ("eps", "offset"),
}


class Lowered(NamedTuple):
    """A model as the engine takes it: what layers share, and the operations of each."""

    model: ModelOps
    layers: Array[LayerOps]


def refusal(spec: ModelSpec, dtype: DType, kv_dtype: DType) -> str | None:
    """Return why the CPU kernels can't run ``spec``, as a clause ("they need …"), or None if they can."""
    dtype, kv_dtype = dtype_name(dtype), dtype_name(kv_dtype)
    if dtype not in NATIVE_DTYPES or kv_dtype not in NATIVE_KV_DTYPES:
        return f"they compute in bfloat16 and float32, not in {dtype} over a KV pool of {kv_dtype}"
    latent = spec.layers[0].attention
    if isinstance(latent, MLASpec) and kv_dtype not in NATIVE_DTYPES:
        return f"they do not compute latent attention over a KV pool of {kv_dtype}"
    if isinstance(latent, MLASpec) and (latent.kv_lora_rank % HEAD_DIM_MULTIPLE or latent.qk_nope_head_dim % 2):
        return (
            f"they need a kv_lora_rank that is a multiple of {HEAD_DIM_MULTIPLE} and an even qk_nope_head_dim, "
            f"not {latent.kv_lora_rank} and {latent.qk_nope_head_dim}"
        )
    if isinstance(latent, MLASpec) and ((latent.q_lora_rank or 0) % 2 or latent.heads * latent.v_head_dim % 2):
        return "they need an even q_lora_rank and even outputs of all heads together"
    if spec.head_dim % HEAD_DIM_MULTIPLE:
        return f"they need a head_dim that is a multiple of {HEAD_DIM_MULTIPLE}, not {spec.head_dim}"
    if spec.hidden_size % 2 or any(size % 2 for layer in spec.layers for size in _inner_sizes(layer)):
        return "they need even hidden and intermediate sizes"
    lacking = next(_lacking(spec), None)
    return None if lacking is None else f"they do not compute {lacking}"


def lower(
    spec: ModelSpec,
    dtype: DType,
    head: Slice | None = None,
    activations: ActivationDType = ActivationDType.INT16,
) -> Lowered:
    """Return ``spec`` as the structs that the C++ engine takes: fused operations over activations of ``dtype``.

    ``spec`` must be one for which ``refusal`` returns None. ``head``: the rows of the LM head that this rank has, or
    None for all. ``activations``: the type that activations are rounded to if weights are quantised.
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
        round_to(spec.embedding_scale, dtype_name(dtype)),
        spec.logit_scale,
        spec.logit_softcap or 0.0,
        lower_latent(attention) if isinstance(attention, MLASpec) else LatentOp(),
        activations,
    )
    return Lowered(model, (LayerOps * spec.num_layers)(*map(_layer, spec.layers)))


def _layer(spec: LayerSpec) -> LayerOps:
    attention = spec.attention
    if isinstance(attention, MLASpec):
        project = ProjectQKV(_norm(spec.before_attention), NativeQKNorm.NONE, 0.0, attention.rope)
        return _with_network(spec, project, Attend(attention.scale, 0.0, 0))
    eps = 0.0 if attention.qk_norm_spec is None else attention.qk_norm_spec.eps
    rope = -1 if attention.rope is None else attention.rope
    project = ProjectQKV(_norm(spec.before_attention), QK_NORMS[attention.qk_norm], eps, rope)
    attend = Attend(attention.scale, attention.softcap or 0.0, min(attention.window or 0, LARGEST))
    return _with_network(spec, project, attend)


def _with_network(spec: LayerSpec, project: ProjectQKV, attend: Attend) -> LayerOps:
    return LayerOps(
        project,
        attend,
        AddProduct(_norm(spec.after_attention), spec.residual_scale),
        GateUp(_norm(spec.before_mlp), ACTIVATIONS[spec.mlp.activation], spec.mlp.inner),
        AddProduct(_norm(spec.after_mlp), spec.residual_scale),
        lower_experts(spec.mlp) if isinstance(spec.mlp, ExpertsSpec) else ExpertsOp(),
    )


def lower_latent(spec: MLASpec) -> LatentOp:
    """Return the sizes and constants of latent attention as the C++ engine takes them."""
    return LatentOp(
        spec.kv_lora_rank,
        spec.q_lora_rank or 0,
        spec.qk_nope_head_dim,
        spec.qk_rope_head_dim,
        spec.v_head_dim,
        spec.norm.eps,
    )


def lower_experts(spec: ExpertsSpec) -> ExpertsOp:
    """Return the sizes and constants of a layer's mixture of experts as the C++ engine takes them."""
    shared_inner, activation = (
        (0, spec.activation) if spec.shared is None else (spec.shared.inner, spec.shared.activation)
    )
    return ExpertsOp(
        spec.count,
        spec.chosen,
        SCORINGS[spec.scoring],
        spec.normalised,
        spec.weight_scale,
        spec.limit or 0.0,
        spec.groups,
        spec.groups_chosen,
        GROUP_SCORES[spec.group_score],
        shared_inner,
        ACTIVATIONS[activation],
        spec.shared_gate,
    )


def _norm(spec: NormSpec | None) -> NormOp:
    return NormOp(0, 0.0) if spec is None else NormOp(1, spec.eps)


def _lacking(spec: ModelSpec) -> Iterator[str]:
    """Yield each field of ``spec``, with its value, that the C++ engine has no operation for."""
    yield from _unknown("", spec, ModelSpec)
    yield from _unknown("final_norm.", spec.final_norm, NormSpec)
    first = spec.layers[0].attention
    for i, layer in enumerate(spec.layers):
        path, attention, mlp = f"layers[{i}].", layer.attention, layer.mlp
        yield from _unknown(path, layer, LayerSpec)
        for name in ("before_attention", "after_attention", "before_mlp", "after_mlp"):
            if (norm := getattr(layer, name)) is not None:
                yield from _unknown(f"{path}{name}.", norm, NormSpec)
        yield from (
            _lacking_experts(f"{path}mlp.", mlp) if isinstance(mlp, ExpertsSpec) else _lacking_mlp(f"{path}mlp.", mlp)
        )
        if isinstance(attention, MLASpec):
            yield from _lacking_latent(f"{path}attention.", attention, first, len(spec.ropes))
            continue
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


def _lacking_latent(path: str, spec: MLASpec, first: object, ropes: int) -> Iterator[str]:
    yield from _unknown(path, spec, MLASpec)
    yield from _unknown(f"{path}norm.", spec.norm, NormSpec)
    # The engine keeps these sizes once, for all layers.
    if not isinstance(first, MLASpec) or replace(first, scale=spec.scale, rope=spec.rope) != spec:
        yield f"{path.removesuffix('.')}: of other sizes than in other layers"
    if not 0 <= spec.rope < ropes:
        yield f"{path}rope: {spec.rope} of {ropes}"


def _lacking_mlp(path: str, spec: MLPSpec) -> Iterator[str]:
    yield from _unknown(path, spec, MLPSpec)
    if spec.activation not in ACTIVATIONS:
        yield f"{path}activation: {spec.activation}"


def _lacking_experts(path: str, spec: ExpertsSpec) -> Iterator[str]:
    yield from _unknown(path, spec, ExpertsSpec)
    for name, known in (("activation", ACTIVATIONS), ("scoring", SCORINGS), ("group_score", GROUP_SCORES)):
        if (value := getattr(spec, name)) not in known:
            yield f"{path}{name}: {value}"
    if not 0 < spec.chosen <= spec.count:
        yield f"{path}chosen: {spec.chosen} of {spec.count}"
    if not 0 < spec.groups_chosen <= spec.groups or spec.count % spec.groups:
        yield f"{path}groups: {spec.groups_chosen} of {spec.groups}, of {spec.count} experts"
    elif spec.chosen > spec.count // spec.groups * spec.groups_chosen:
        yield f"{path}chosen: {spec.chosen} of {spec.groups_chosen} groups of {spec.count // spec.groups}"
    if spec.shared is not None:
        yield from _lacking_mlp(f"{path}shared.", spec.shared)
    elif spec.shared_gate:
        yield f"{path}shared_gate: without shared"


def _inner_sizes(layer: LayerSpec) -> Iterator[int]:
    for network in (layer.mlp, getattr(layer.mlp, "shared", None)):
        if network is not None:
            yield getattr(network, "inner", 0)


def _unknown(path: str, part: object, kind: type) -> Iterator[str]:
    """Yield each field of ``part`` that the C++ engine would ignore, with its value, as "path.field: value".

    These are the fields that ``COMPUTED`` does not list for ``kind`` and that differ from their default. If ``part`` is
    not of the type ``kind``, yield only its type. ``path``: prefix of the names.
    """
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
