"""SmolLM3: a Llama in which every fourth layer does not know positions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import UnsupportedModel
from ..spec import ModelSpec, Pairing
from ..tensor_names import HF_LLAMA
from .llama import pre_normed

if TYPE_CHECKING:
    from .gguf_config import GGUFConfig
    from .hf_config import HFConfig

DEFAULTS = {"no_rope_layer_interval": 4, "tie_word_embeddings": True}
INTERVAL = 4


def from_hf(config: HFConfig) -> ModelSpec:
    """Read the config of SmolLM3.

    Layers without positions have the sliding window, and the others have none.
    ``layer_types`` may say otherwise.
    No layer has a window unless the config sets ``use_sliding_window``.
    """
    interval, ropes = config.integer("no_rope_layer_interval", least=1), config.sequence("no_rope_layers")
    if config.get("no_rope_layers") is None:
        ropes = [(i + 1) % interval != 0 for i in range(config.num_layers)]
    if len(ropes) < config.num_layers:
        raise UnsupportedModel(f"no_rope_layers names {len(ropes)} of {config.num_layers} layers")
    is_meant = config.flag("use_sliding_window")
    windows = config.windows([not has_rope for has_rope in ropes], are_used=is_meant)
    attentions = [
        replace(config.attention(), rope=0 if has_rope else None, window=window)
        for has_rope, window in zip(ropes, windows, strict=False)
    ]
    layers = pre_normed(attentions, config.mlp(), config.norm())
    return config.model(layers, config.rope(theta=2e6), tensors=HF_LLAMA)


def from_gguf(config: GGUFConfig) -> ModelSpec:
    """Read GGUF metadata of SmolLM3. Every fourth layer has no positions, which the metadata do not say."""
    attentions = [replace(config.attention(), rope=0 if (i + 1) % INTERVAL else None) for i in range(config.num_layers)]
    return config.model(pre_normed(attentions, config.mlp(), config.norm()), config.rope(Pairing.NEIGHBOURS))
