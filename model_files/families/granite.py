"""Granite 3: a Llama with four scales."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, NormSpec, Pairing
from ..tensor_names import HF_LLAMA
from .llama import pre_normed

if TYPE_CHECKING:
    from .gguf_config import GGUFConfig
    from .hf_config import HFConfig


def from_hf(config: HFConfig) -> ModelSpec:
    """Read the config of a Granite model. Its logits are divided by ``logits_scaling``."""
    attention = replace(config.attention(), scale=config.number("attention_multiplier", 1.0))
    residual_scale = config.number("residual_multiplier", 1.0)
    return config.model(
        _layers([attention] * config.num_layers, config.mlp(), config.norm(), residual_scale),
        config.rope(),
        tensors=HF_LLAMA,
        embedding_scale=config.number("embedding_multiplier", 1.0),
        logit_scale=1.0 / config.number("logits_scaling", 1.0),
    )


def from_gguf(config: GGUFConfig) -> ModelSpec:
    """Read GGUF metadata of a Granite model. Rotated pairs are neighbours, as in all of llama.cpp's Llamas."""
    attention = config.attention()
    attention = replace(attention, scale=config.number("attention.scale", 0.0) or attention.scale)
    residual_scale = config.number("residual_scale", 1.0)
    return config.model(
        _layers([attention] * config.num_layers, config.mlp(), config.norm(), residual_scale),
        config.rope(Pairing.NEIGHBOURS),
        embedding_scale=config.number("embedding_scale", 1.0),
        logit_scale=1.0 / config.number("logit_scale", 1.0),
    )


def _layers(attentions: list[AttentionSpec], mlp: MLPSpec, norm: NormSpec, residual_scale: float) -> list[LayerSpec]:
    return [replace(layer, residual_scale=residual_scale) for layer in pre_normed(attentions, mlp, norm)]
