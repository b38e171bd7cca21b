"""Qwen2-MoE (Qwen1.5-MoE among them) and Qwen3-MoE: experts in most layers, in the older one a shared one too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..spec import AttentionSpec, ExpertsSpec, LayerSpec, MLPSpec, ModelSpec, QKNorm
from ..tensor_names import GGUF_EXPERTS, GGUF_LAYER, HF_EXPERTS, HF_LLAMA
from .llama import pre_normed

if TYPE_CHECKING:
    from .gguf_config import GGUFConfig
    from .hf_config import HFConfig

SPARSE = {"decoder_sparse_step": 1, "sliding_window": 4096}
QWEN2_DEFAULTS = {
    **SPARSE,
    "qkv_bias": True,
    "max_window_layers": 28,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 4,
    "shared_expert_intermediate_size": 5632,
}
QWEN3_DEFAULTS = {**SPARSE, "moe_intermediate_size": 768, "num_experts_per_tok": 8}
QWEN3_TENSORS = HF_LLAMA | HF_EXPERTS
QWEN2_TENSORS = QWEN3_TENSORS | {
    "mlp.shared_expert.gate_proj": ("shared.gate_proj",),
    "mlp.shared_expert.up_proj": ("shared.up_proj",),
    "mlp.shared_expert.down_proj": ("shared.down_proj",),
    "mlp.shared_expert_gate": ("shared_gate",),
}


def qwen2_from_hf(config: HFConfig) -> ModelSpec:
    """Read the config of Qwen2-MoE.

    If windows are enabled and ``layer_types`` is missing, every other layer below ``max_window_layers`` has one.
    """
    attention = replace(config.attention(), qkv_bias=config.flag("qkv_bias"), o_bias=False)
    first = config.integer("max_window_layers")
    slides = [i % 2 == 0 and i < first for i in range(config.num_layers)]
    windows = config.windows(slides, are_used=_uses_windows(config))
    experts = _experts(config)
    shared = MLPSpec(inner=config.integer("shared_expert_intermediate_size"), activation=experts.activation)
    layers = _layers(config, attention, windows, replace(experts, shared=shared, shared_gate=True))
    return config.model(layers, config.rope(), tensors=QWEN2_TENSORS)


def qwen3_from_hf(config: HFConfig) -> ModelSpec:
    """Read the config of Qwen3-MoE, with normalised heads of q and k. If windows are enabled, all layers have one."""
    attention = replace(config.attention(), qk_norm=QKNorm.HEAD, qk_norm_spec=config.norm())
    window = config.window(is_used=_uses_windows(config))
    windows = [window] * config.num_layers
    layers = _layers(config, attention, windows, _experts(config))
    return config.model(layers, config.rope(), tensors=QWEN3_TENSORS)


def qwen2_from_gguf(config: GGUFConfig) -> ModelSpec:
    """Read GGUF metadata of Qwen2-MoE. All layers have experts and see the whole context, as in llama.cpp."""
    shared = MLPSpec(inner=config.integer("expert_shared_feed_forward_length"))
    experts = replace(config.experts(normalised=False), shared=shared, shared_gate=True)
    return _from_gguf(config, config.attention(), experts)


def qwen3_from_gguf(config: GGUFConfig) -> ModelSpec:
    """Read GGUF metadata of Qwen3-MoE. All layers have experts and see the whole context, as in llama.cpp."""
    attention = replace(config.attention(), qk_norm=QKNorm.HEAD, qk_norm_spec=config.norm())
    return _from_gguf(config, attention, config.experts())


def _uses_windows(config: HFConfig) -> bool:
    # The window is always written; this key says whether it is meant.
    return config.flag("use_sliding_window")


def _experts(config: HFConfig) -> ExpertsSpec:
    return replace(config.experts("moe_intermediate_size"), normalised=config.flag("norm_topk_prob"))


def _layers(
    config: HFConfig, attention: AttentionSpec, windows: Sequence[int | None], experts: ExpertsSpec
) -> list[LayerSpec]:
    """Make a layer for each of ``windows``. Layer i, counted from 1, has experts if ``decoder_sparse_step`` divides i.

    The others, and those that ``mlp_only_layers`` lists, counted from 0, have an MLP.
    """
    layers = pre_normed([replace(attention, window=window) for window in windows], experts, config.norm())
    step, without = config.integer("decoder_sparse_step", least=1), config.sequence("mlp_only_layers")
    is_dense = [i in without or (i + 1) % step != 0 for i in range(config.num_layers)]
    if not any(is_dense):
        return layers
    mlp = config.mlp()
    return [replace(layer, mlp=mlp) if dense else layer for layer, dense in zip(layers, is_dense, strict=True)]


def _from_gguf(config: GGUFConfig, attention: AttentionSpec, experts: ExpertsSpec) -> ModelSpec:
    layers = pre_normed([attention] * config.num_layers, experts, config.norm())
    return config.model(layers, config.rope(), tensors=GGUF_LAYER | GGUF_EXPERTS)
