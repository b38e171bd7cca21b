"""Mixtral: a Mistral with experts in the place of its network."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..spec import ModelSpec
from ..tensor_names import HF_EXPERTS, HF_LLAMA
from .llama import pre_normed

if TYPE_CHECKING:
    from .hf_config import HFConfig

DEFAULTS = {"num_experts_per_tok": 2, "rms_norm_eps": 1e-5}
THETA = 1e6
TENSORS = (
    HF_LLAMA
    | HF_EXPERTS
    | {
        "block_sparse_moe.gate": ("router",),
        "block_sparse_moe.experts.*.w1": ("experts.*.gate_proj",),
        "block_sparse_moe.experts.*.w2": ("experts.*.down_proj",),
        "block_sparse_moe.experts.*.w3": ("experts.*.up_proj",),
    }
)


def from_hf(config: HFConfig) -> ModelSpec:
    """Read the config of Mixtral. All layers have the window, if there is one."""
    attentions = [replace(config.attention(), window=config.window())] * config.num_layers
    layers = pre_normed(attentions, config.experts(), config.norm())
    return config.model(layers, config.rope(theta=THETA), tensors=TENSORS)
