"""Qwen2, Qwen2.5 (which calls itself the same) and Qwen3."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..spec import AttentionSpec, ModelSpec, QKNorm
from ..tensor_names import HF_LLAMA
from .llama import pre_normed

if TYPE_CHECKING:
    from .gguf_config import GGUFConfig
    from .hf_config import HFConfig

QWEN2_DEFAULTS = {"max_window_layers": 28, "sliding_window": 4096}
QWEN3_DEFAULTS = {**QWEN2_DEFAULTS, "head_dim": 128}


def qwen2_from_hf(config: HFConfig) -> ModelSpec:
    """Read the config of Qwen2, with biases of q, k and v whatever ``attention_bias`` says."""
    attention = replace(config.attention(), qkv_bias=True, o_bias=False)
    return _from_hf(config, attention)


def qwen3_from_hf(config: HFConfig) -> ModelSpec:
    """Read the config of Qwen3, with normalised heads of q and k."""
    attention = replace(config.attention(), qk_norm=QKNorm.HEAD, qk_norm_spec=config.norm())
    return _from_hf(config, attention)


def qwen2_from_gguf(config: GGUFConfig) -> ModelSpec:
    """Read GGUF metadata of Qwen2. All layers see the whole context, because llama.cpp has no windows for it."""
    attentions = [config.attention()] * config.num_layers
    return config.model(pre_normed(attentions, config.mlp(), config.norm()), config.rope())


def qwen3_from_gguf(config: GGUFConfig) -> ModelSpec:
    """Read GGUF metadata of Qwen3, with normalised heads of q and k. All layers see the whole context."""
    attention = replace(config.attention(), qk_norm=QKNorm.HEAD, qk_norm_spec=config.norm())
    layers = pre_normed([attention] * config.num_layers, config.mlp(), config.norm())
    return config.model(layers, config.rope())


def _from_hf(config: HFConfig, attention: AttentionSpec) -> ModelSpec:
    first = config.integer("max_window_layers")
    # The window is always written; this key says whether it is meant.
    is_meant = config.flag("use_sliding_window")
    windows = config.windows([i >= first for i in range(config.num_layers)], are_used=is_meant)
    attentions = [replace(attention, window=window) for window in windows]
    return config.model(pre_normed(attentions, config.mlp(), config.norm()), config.rope(), tensors=HF_LLAMA)
