"""Llama 2 and 3, Mistral, SmolLM and SmolLM2, and the many that are made like them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..spec import AttentionSpec, ExpertsSpec, LayerSpec, MLPSpec, ModelSpec, NormSpec, Pairing
from ..tensor_names import GGUF_EXPERTS, GGUF_LAYER, HF_LLAMA

if TYPE_CHECKING:
    from .gguf_config import GGUFConfig
    from .hf_config import HFConfig


def pre_normed(attentions: Sequence[AttentionSpec], mlp: MLPSpec | ExpertsSpec, norm: NormSpec) -> list[LayerSpec]:
    """Make one layer for each attention, with norms only before attention and MLP, and none after them."""
    return [LayerSpec(attention=a, mlp=mlp, before_attention=norm, before_mlp=norm) for a in attentions]


def from_hf(config: HFConfig) -> ModelSpec:
    """Read the config of a Llama."""
    attentions = [config.attention()] * config.num_layers
    return config.model(pre_normed(attentions, config.mlp(), config.norm()), config.rope(), tensors=HF_LLAMA)


def mistral_from_hf(config: HFConfig) -> ModelSpec:
    """Read the config of a Mistral: no biases, and one window over all layers unless ``layer_types`` says otherwise."""
    windows = config.windows([True] * config.num_layers)
    attentions = [replace(config.attention(), window=window) for window in windows]
    return config.model(pre_normed(attentions, config.mlp(), config.norm()), config.rope(), tensors=HF_LLAMA)


def from_gguf(config: GGUFConfig) -> ModelSpec:
    """Read GGUF metadata of a Llama or a model like it, Mixtral included.

    Rotated pairs are neighbours. All layers have the window, if there is one.
    """
    window = int(config.number("attention.sliding_window", 0)) or None
    attentions = [replace(config.attention(), window=window)] * config.num_layers
    has_experts = config.number("expert_count", 0) > 0
    layers = pre_normed(
        attentions, config.experts("feed_forward_length") if has_experts else config.mlp(), config.norm()
    )
    return config.model(layers, config.rope(Pairing.NEIGHBOURS), tensors=GGUF_LAYER | GGUF_EXPERTS)
