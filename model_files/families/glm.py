"""GLM-4: rotates neighbours, in a half of each head; "glm" is the one of 2024, "glm4" has norms on both sides."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..spec import LayerSpec, ModelSpec, NormSpec, Pairing
from ..tensor_names import GGUF_FUSED_UP, HF_FUSED, HF_LINEAR
from .llama import pre_normed

if TYPE_CHECKING:
    from .gguf_config import GGUFConfig
    from .hf_config import HFConfig

DEFAULTS = {"attention_bias": True, "head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-7}
HF_TENSORS = HF_LINEAR | {
    "mlp.gate_up_proj": HF_FUSED["mlp.gate_up_proj"],
    "input_layernorm": ("before_attention",),
    "post_self_attn_layernorm": ("after_attention",),
    "post_attention_layernorm": ("before_mlp",),
    "post_mlp_layernorm": ("after_mlp",),
}


def glm_from_hf(config: HFConfig) -> ModelSpec:
    """Read the config of the GLM-4 of 2024 ("glm"), with norms only before attention and MLP."""
    return _from_hf(config, None)


def glm4_from_hf(config: HFConfig) -> ModelSpec:
    """Read the config of the GLM-4 of 2025 ("glm4"), with norms before and after attention and MLP."""
    return _from_hf(config, config.norm())


def from_gguf(config: GGUFConfig) -> ModelSpec:
    """Read GGUF metadata of either GLM-4. A tensor of the norm after attention tells the newer one."""
    norm = config.norm()
    layers = pre_normed([config.attention()] * config.num_layers, config.mlp(), norm)
    after = norm if config.has("blk.0.post_attention_norm.weight") else None
    return config.model(_with_after(layers, after), config.rope(Pairing.NEIGHBOURS), tensors=GGUF_FUSED_UP)


def _from_hf(config: HFConfig, after: NormSpec | None) -> ModelSpec:
    # The bias is that of q, k and v.
    attention = replace(config.attention(), o_bias=False)
    layers = pre_normed([attention] * config.num_layers, config.mlp(), config.norm())
    rope = config.rope(partial=0.5, pairing=Pairing.NEIGHBOURS)
    return config.model(_with_after(layers, after), rope, tensors=HF_TENSORS)


def _with_after(layers: list[LayerSpec], norm: NormSpec | None) -> list[LayerSpec]:
    return [replace(layer, after_attention=norm, after_mlp=norm) for layer in layers]
