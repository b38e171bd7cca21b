"""GPT-OSS: attention with sinks, a window in every other layer, experts with a clamped activation, biases everywhere.

Published files have the experts in MXFP4, others as floats, with rows for columns; gate and up take turns in both.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..spec import AttentionSpec, ModelSpec, Stack
from ..tensor_names import GGUF_EXPERTS, GGUF_LAYER, HF_LLAMA
from .llama import pre_normed

if TYPE_CHECKING:
    from .gguf_config import GGUFConfig
    from .hf_config import HFConfig

DEFAULTS = {
    "attention_bias": True,
    "head_dim": 64,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 4,
    "rms_norm_eps": 1e-5,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
}
SCALING = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
THETA = 150000.0
LIMIT = 7.0
"""Limit of the experts' activations in both models; a GGUF does not say it."""
GATE_UP = ("gate_proj.weight", "up_proj.weight")
DOWN = ("down_proj.weight",)
HF_TENSORS = HF_LLAMA | {
    "self_attn.sinks": ("sinks",),
    "mlp.router": ("router",),
    "mlp.experts.gate_up_proj": Stack(GATE_UP, interleaved=True, transposed=True),
    "mlp.experts.gate_up_proj_blocks": Stack(GATE_UP, interleaved=True),
    "mlp.experts.gate_up_proj_bias": Stack(("gate_proj.bias", "up_proj.bias"), interleaved=True),
    "mlp.experts.down_proj": Stack(DOWN, transposed=True),
    "mlp.experts.down_proj_blocks": Stack(DOWN),
    "mlp.experts.down_proj_bias": Stack(("down_proj.bias",)),
}
GGUF_TENSORS = GGUF_LAYER | GGUF_EXPERTS | {"attn_sinks.weight": ("sinks",), "post_attention_norm": ("before_mlp",)}
PERIOD = 2
"""Period of the layers: the first one of each period has the window."""


def from_hf(config: HFConfig) -> ModelSpec:
    """Read the config of a GPT-OSS model. Weights in MXFP4 are dequantised when they are loaded."""
    _allow_mxfp4(config)
    windows = config.windows([i % PERIOD == 0 for i in range(config.num_layers)])
    attentions = [replace(_with_sinks(config.attention()), window=window) for window in windows]
    experts = replace(config.experts(), bias=True, router_bias=True, limit=config.number("swiglu_limit", LIMIT))
    rope = config.rope(theta=THETA, scaling=SCALING)
    return config.model(pre_normed(attentions, experts, config.norm()), rope, tensors=HF_TENSORS)


def from_gguf(config: GGUFConfig) -> ModelSpec:
    """Read GGUF metadata of a GPT-OSS model.

    YaRN's range of dimensions is not rounded, although llama.cpp rounds it.
    """
    window = config.integer("attention.sliding_window")
    attention = _with_sinks(config.attention())
    attentions = [replace(attention, window=window if slides else None) for slides in config.slides(PERIOD)]
    layers = pre_normed(attentions, replace(config.experts(), limit=LIMIT), config.norm())
    return config.model(layers, replace(config.rope(), truncate=False), tensors=GGUF_TENSORS)


def _allow_mxfp4(config: HFConfig) -> None:
    """Mark ``quantization_config`` as read if it is MXFP4, which the loader dequantises."""
    quantised = config.raw.get("quantization_config")
    if isinstance(quantised, dict) and quantised.get("quant_method") == "mxfp4":
        config.get("quantization_config")


def _with_sinks(attention: AttentionSpec) -> AttentionSpec:
    return replace(attention, sinks=True)
