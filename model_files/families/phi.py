"""Phi-3 and Phi-4: a Llama with its projections in two tensors. It may rotate a part of each head, by longrope."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..spec import ModelSpec
from ..tensor_names import GGUF_FUSED_UP, HF_FUSED, HF_LLAMA
from .llama import pre_normed

if TYPE_CHECKING:
    from .gguf_config import GGUFConfig
    from .hf_config import HFConfig

DEFAULTS = {"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5}


def from_hf(config: HFConfig) -> ModelSpec:
    """Read the config of Phi-3 or Phi-4. All layers have the window, if there is one."""
    attentions = [replace(config.attention(), window=config.window())] * config.num_layers
    # The first files called what became longrope by these names.
    rope = config.rope(partial=1.0, aliases={"su": "longrope", "yarn": "longrope"})
    return config.model(pre_normed(attentions, config.mlp(), config.norm()), rope, tensors=HF_LLAMA | HF_FUSED)


def from_gguf(config: GGUFConfig) -> ModelSpec:
    """Read GGUF metadata of Phi-3 or Phi-4.

    All layers have the window if the file names one, although llama.cpp ignores it.
    """
    window = int(config.number("attention.sliding_window", 0)) or None
    attentions = [replace(config.attention(), window=window)] * config.num_layers
    layers = pre_normed(attentions, config.mlp(), config.norm())
    return config.model(layers, config.rope(), tensors=GGUF_FUSED_UP)
