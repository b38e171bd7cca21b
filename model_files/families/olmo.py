"""OLMo 2 and 3: normalise what comes out of attention and network instead of what goes in, and all of q and k at once.

OLMo 3 gives three layers of four a window, and these a rope of their own, as it stretches the others' alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, NormSpec, QKNorm
from ..tensor_names import HF_LINEAR
from .gemma import sliding

if TYPE_CHECKING:
    from .gguf_config import GGUFConfig
    from .hf_config import HFConfig

HF_TENSORS = HF_LINEAR | {
    "post_attention_layernorm": ("after_attention",),
    "post_feedforward_layernorm": ("after_mlp",),
}
OLMO2_DEFAULTS = {"rms_norm_eps": 1e-5}
OLMO3_DEFAULTS = {**OLMO2_DEFAULTS, "sliding_window": 4096}
OLMO3_THETA = 500000.0


def olmo2_from_hf(config: HFConfig) -> ModelSpec:
    """Read the config of OLMo 2. All layers see the whole context."""
    layer = _layer(config.attention(), config.mlp(), config.norm())
    return config.model([layer] * config.num_layers, config.rope(), tensors=HF_TENSORS)


def olmo3_from_hf(config: HFConfig) -> ModelSpec:
    """Read the config of OLMo 3. Every fourth layer sees the whole context."""
    slides = config.slides([(i + 1) % 4 != 0 for i in range(config.num_layers)])
    attentions = sliding(config.attention(), slides, config.integer("sliding_window"))
    # In the older spelling, transformers has the rope_theta of layers with a window from here; published files agree.
    ropes = [config.rope(layer_type=f"{kind}_attention", theta=OLMO3_THETA) for kind in ("full", "sliding")]
    layers = [_layer(attention, config.mlp(), config.norm()) for attention in attentions]
    return config.model(layers, *ropes, tensors=HF_TENSORS)


def from_gguf(config: GGUFConfig) -> ModelSpec:
    """Read GGUF metadata of OLMo 2. All layers see the whole context."""
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
