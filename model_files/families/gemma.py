"""Gemma 2 and 3: norms on both sides of attention and network, windows in most layers, scaled embeddings.

Norms multiply by their weight plus one; a GGUF has the one in its weights. Gemma 2 caps scores and logits, Gemma 3
normalises heads instead and gives the layers with a window a rope of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..spec import Activation, AttentionSpec, LayerSpec, MLPSpec, ModelSpec, NormSpec, QKNorm, RopeSpec
from ..tensor_names import HF_LINEAR

if TYPE_CHECKING:
    from .gguf_config import GGUFConfig
    from .hf_config import HFConfig

HF_TENSORS = HF_LINEAR | {
    "input_layernorm": ("before_attention",),
    "post_attention_layernorm": ("after_attention",),
    "pre_feedforward_layernorm": ("before_mlp",),
    "post_feedforward_layernorm": ("after_mlp",),
}
GEMMA2_DEFAULTS = {
    "vocab_size": 256000,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "tie_word_embeddings": True,
}
GEMMA3_DEFAULTS = {
    **GEMMA2_DEFAULTS,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "sliding_window_pattern": 6,
}
LARGEST = {"gemma2": 46, "gemma3": 62}
"""Number of layers of the family's 27B model. Its scores are scaled by another size than head_dim, and a GGUF does not
say so.
"""
PATTERNS = {"gemma2": 2, "gemma3": 6}
"""Period of the layers in a GGUF that does not state it: only the last one of each period sees the whole context."""
LOCAL_THETA = 10000.0


def gemma2_from_hf(config: HFConfig) -> ModelSpec:
    """Read the config of Gemma 2. Every other layer has a sliding window, beginning with the first."""
    windows = config.windows([i % 2 == 0 for i in range(config.num_layers)])
    attention = replace(_attention_from_hf(config), softcap=_cap(config, "attn_logit_softcapping"))
    return _from_hf(config, [replace(attention, window=window) for window in windows], config.rope())


def gemma3_from_hf(config: HFConfig) -> ModelSpec:
    """Read the config of Gemma 3's text model. Layers with a window have a rope of their own.

    If the config has no ``layer_types``, these are all but the last of each ``sliding_window_pattern`` layers.
    """
    norm = config.norm(offset=1.0)
    attention = replace(_attention_from_hf(config), qk_norm=QKNorm.HEAD, qk_norm_spec=norm)
    pattern = config.integer("sliding_window_pattern", least=1)
    slides = config.slides([(i + 1) % pattern != 0 for i in range(config.num_layers)])
    local_theta = config.positive("rope_local_base_freq", LOCAL_THETA)
    ropes = (
        config.rope(layer_type="full_attention", theta=1e6),
        config.rope(layer_type="sliding_attention", theta=local_theta),
    )
    attentions = sliding(attention, slides, config.integer("sliding_window"))
    return _from_hf(config, attentions, *ropes)


def gemma2_from_gguf(config: GGUFConfig) -> ModelSpec:
    """Read GGUF metadata of Gemma 2. If the file has no pattern, every other layer has a window, from the first on."""
    attention = replace(_attention_from_gguf(config), softcap=config.number("attn_logit_softcapping", 50.0) or None)
    window = config.integer("attention.sliding_window")
    attentions = [
        replace(attention, window=window if slides else None) for slides in config.slides(PATTERNS[config.family])
    ]
    return _from_gguf(config, attentions, 30.0, config.rope())


def gemma3_from_gguf(config: GGUFConfig) -> ModelSpec:
    """Read GGUF metadata of Gemma 3's text model. Layers with a window have a rope of their own.

    If the file has no pattern, these are all but every sixth.
    """
    attention = replace(_attention_from_gguf(config), qk_norm=QKNorm.HEAD, qk_norm_spec=config.norm())
    attentions = sliding(attention, config.slides(PATTERNS[config.family]), config.integer("attention.sliding_window"))
    rope = config.rope()
    local = RopeSpec(rotary_dim=rope.rotary_dim, theta=config.positive("rope.freq_base_swa", LOCAL_THETA))
    return _from_gguf(config, attentions, 0.0, rope, local)


def sliding(attention: AttentionSpec, slides: Sequence[bool], window: int) -> list[AttentionSpec]:
    """Return the attention of each layer.

    Where ``slides`` is True, the layer has a window of ``window`` tokens and the second of the model's ropes (index 1).
    The other layers have ``attention`` as it is.
    """
    local = replace(attention, window=window, rope=1)
    return [local if is_sliding else attention for is_sliding in slides]


def _layers(attentions: Sequence[AttentionSpec], mlp: MLPSpec, norm: NormSpec) -> list[LayerSpec]:
    return [
        LayerSpec(
            attention=attention,
            mlp=mlp,
            before_attention=norm,
            after_attention=norm,
            before_mlp=norm,
            after_mlp=norm,
        )
        for attention in attentions
    ]


def _attention_from_hf(config: HFConfig) -> AttentionSpec:
    return replace(config.attention(), scale=config.positive("query_pre_attn_scalar", config.head_dim) ** -0.5)


def _cap(config: HFConfig, key: str) -> float | None:
    """Return the soft cap of ``key``; None if it is missing, null or 0."""
    return None if config.get(key) is None else config.number(key, 0.0) or None


def _from_hf(config: HFConfig, attentions: Sequence[AttentionSpec], *ropes: RopeSpec) -> ModelSpec:
    norm = config.norm(offset=1.0)
    return config.model(
        _layers(attentions, config.mlp("hidden_activation"), norm),
        *ropes,
        tensors=HF_TENSORS,
        final_norm=norm,
        embedding_scale=config.integer("hidden_size") ** 0.5,
        logit_softcap=_cap(config, "final_logit_softcapping"),
    )


def _attention_from_gguf(config: GGUFConfig) -> AttentionSpec:
    attention = config.attention()
    if config.num_layers != LARGEST[config.family]:
        return attention
    return replace(attention, scale=(config.integer("embedding_length") / config.heads) ** -0.5)


def _from_gguf(config: GGUFConfig, attentions: Sequence[AttentionSpec], softcap: float, *ropes: RopeSpec) -> ModelSpec:
    mlp = replace(config.mlp(), activation=Activation.GELU_TANH)
    return config.model(
        _layers(attentions, mlp, config.norm()),
        *ropes,
        embedding_scale=config.integer("embedding_length") ** 0.5,
        logit_softcap=config.number("final_logit_softcapping", softcap) or None,
    )
