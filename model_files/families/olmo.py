"""OLMo 2: normalises what comes out of attention and network instead of what goes in, and all of q and k at once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, NormSpec, QKNorm
from ..tensor_names import HF_LINEAR

if TYPE_CHECKING:
    from .gguf_config import GGUFConfig
    from .hf_config import HFConfig

HF_TENSORS = HF_LINEAR | {
    "post_attention_layernorm": ("after_attention",),
    "post_feedforward_layernorm": ("after_mlp",),
}


def from_hf(config: HFConfig) -> ModelSpec:
    """OLMo 2."""
    layer = _layer(config.attention(), config.mlp(), config.norm())
    return config.model([layer] * config.num_layers, config.rope(), tensors=HF_TENSORS)


def from_gguf(config: GGUFConfig) -> ModelSpec:
    """OLMo 2."""
    layer = _layer(config.attention(), config.mlp(), config.norm())
    return config.model([layer] * config.num_layers, config.rope())


def _layer(attention: AttentionSpec, mlp: MLPSpec, norm: NormSpec) -> LayerSpec:
    return LayerSpec(
        attention=replace(attention, qk_norm=QKNorm.ALL, qk_norm_spec=norm),
        mlp=mlp,
        before_attention=None,
        before_mlp=None,
        after_attention=norm,
        after_mlp=norm,
    )
