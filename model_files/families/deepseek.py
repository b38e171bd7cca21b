"""DeepSeek-V2 and V3: latent attention, and experts behind the first layers, some of which every token goes through."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import UnsupportedModel, whole
from ..spec import (
    ExpertScoring,
    ExpertsSpec,
    GroupScore,
    LayerSpec,
    MLASpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
    Pairing,
    RopeSpec,
    RopeType,
)
from ..tensor_names import GGUF_EXPERTS, GGUF_LATENT, GGUF_LAYER, HF_EXPERTS, HF_LATENT, HF_LLAMA
from .hf_rope import rope_number, rope_parameters

if TYPE_CHECKING:
    from .gguf_config import GGUFConfig
    from .hf_config import HFConfig

LATENT_NORM = NormSpec(eps=1e-6)
"""Whatever rms_norm_eps is."""
SHARED = {f"mlp.shared_experts.{part}_proj": (f"shared.{part}_proj",) for part in ("gate", "up", "down")}
HF_TENSORS = HF_LLAMA | HF_LATENT | HF_EXPERTS | SHARED
GGUF_TENSORS = GGUF_LAYER | GGUF_LATENT | GGUF_EXPERTS
V2_DEFAULTS = {"first_k_dense_replace": 0, "topk_method": "greedy", "n_shared_experts": 2, "routed_scaling_factor": 1.0}
V3_DEFAULTS = {
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "rope_interleave": True,
}
SOFTMAX, SIGMOID = (None, 0, 1), (2,)
"""A GGUF's expert_gating_func; older files have none."""


def v2_from_hf(config: HFConfig) -> ModelSpec:
    """Read the config of V2. Experts are chosen by softmax, among all or in the groups with the best expert."""
    _expect(config, "scoring_func", "softmax")
    # transformers leaves the weights as they are whatever this says; DeepSeek's own code does not.
    _expect(config, "norm_topk_prob", False)
    method = config.get("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModel(f"topk_method {method!r} is not supported for a {config.family!r} model")
    experts = replace(_experts(config), normalised=False)
    if method == "group_limited_greedy":
        experts = replace(experts, groups=config.integer("n_group"), groups_chosen=config.integer("topk_group"))
    return _from_hf(config, experts, Pairing.NEIGHBOURS)


def v3_from_hf(config: HFConfig) -> ModelSpec:
    """Read the config of V3.

    Experts are chosen by sigmoid and a balancing bias, in the groups with the best two experts.
    """
    _expect(config, "scoring_func", "sigmoid")
    _expect(config, "topk_method", "noaux_tc")
    experts = replace(
        _experts(config),
        scoring=ExpertScoring.SIGMOID,
        normalised=config.flag("norm_topk_prob", nullable=True),
        choice_bias=True,
        groups=config.integer("n_group"),
        groups_chosen=config.integer("topk_group"),
        group_score=GroupScore.TWO_LARGEST,
    )
    pairing = Pairing.NEIGHBOURS if config.flag("rope_interleave", nullable=True) else Pairing.HALVES
    spec = _from_hf(config, experts, pairing)
    return replace(spec, draft_layers=whole(config.get("num_nextn_predict_layers") or 0))


def from_gguf(config: GGUFConfig) -> ModelSpec:
    """Read GGUF metadata of V2 or V3. Rotated pairs are neighbours, and cosines and sines are not scaled."""
    rope = config.rope(Pairing.NEIGHBOURS)
    if rope.type is RopeType.YARN:
        rope = replace(rope, attention_factor=1.0)
    # Files since llama.cpp has the absorbed form state the latent's sizes beside the heads'.
    head = config.integer("attention.key_length_mla" if _is_absorbed(config) else "attention.key_length")
    value = config.integer("attention.value_length_mla" if _is_absorbed(config) else "attention.value_length")
    attention = MLASpec(
        heads=config.heads,
        q_lora_rank=config.integer("attention.q_lora_rank") if config.get("attention.q_lora_rank") else None,
        kv_lora_rank=config.integer("attention.kv_lora_rank"),
        qk_nope_head_dim=head - rope.rotary_dim,
        qk_rope_head_dim=rope.rotary_dim,
        v_head_dim=value,
        scale=_scale(head, rope, 10.0 * config.number("rope.scaling.yarn_log_multiplier", 0.0)),
        norm=config.norm(),
    )
    dense = int(config.number("leading_dense_block_count", 0))
    gating = config.get("expert_gating_func")
    if gating not in SOFTMAX + SIGMOID:
        raise UnsupportedModel(f"expert_gating_func {gating!r} is not supported for this family")
    is_sigmoid = gating in SIGMOID
    inner = config.integer("expert_feed_forward_length")
    experts = ExpertsSpec(
        count=config.integer("expert_count"),
        chosen=config.integer("expert_used_count"),
        inner=inner,
        scoring=ExpertScoring.SIGMOID if is_sigmoid else ExpertScoring.SOFTMAX,
        normalised=bool(config.get("expert_weights_norm")),
        # Nought is llama.cpp's word for none.
        weight_scale=config.number("expert_weights_scale", 0.0) or 1.0,
        choice_bias=config.has(f"blk.{dense}.exp_probs_b.bias"),
        groups=int(config.number("expert_group_count", 1)) or 1,
        groups_chosen=int(config.number("expert_group_used_count", 1)) or 1,
        group_score=GroupScore.TWO_LARGEST if is_sigmoid else GroupScore.LARGEST,
        shared=_shared(MLPSpec(inner=inner), config.integer("expert_shared_count")),
    )
    layers = _layers(attention, config.mlp(), experts, config.norm(), dense, config.num_layers)
    return config.model(layers, rope, tensors=GGUF_TENSORS)


def _from_hf(config: HFConfig, experts: ExpertsSpec, pairing: Pairing) -> ModelSpec:
    _expect(config, "num_key_value_heads", config.heads)
    _expect(config, "moe_layer_freq", 1)
    rope = replace(config.rope(pairing=pairing), rotary_dim=config.integer("qk_rope_head_dim"))
    bias = config.flag("attention_bias")
    rank = None if config.get("q_lora_rank") is None else config.integer("q_lora_rank", least=1)
    nope = config.integer("qk_nope_head_dim")
    attention = MLASpec(
        heads=config.heads,
        q_lora_rank=rank,
        kv_lora_rank=config.integer("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope.rotary_dim,
        v_head_dim=config.integer("v_head_dim"),
        scale=_scale(nope + rope.rotary_dim, rope, rope_number(rope_parameters(config), "mscale_all_dim", 0.0)),
        norm=LATENT_NORM,
        a_bias=bias,
        o_bias=bias,
    )
    dense = config.integer("first_k_dense_replace")
    layers = _layers(attention, config.mlp(), experts, config.norm(), dense, config.num_layers)
    return config.model(layers, rope, tensors=HF_TENSORS)


def _experts(config: HFConfig) -> ExpertsSpec:
    """Read the experts of V2 or V3. The shared ones form one network, as wide as all of them together."""
    mlp, inner = config.mlp(), config.integer("moe_intermediate_size")
    return ExpertsSpec(
        count=config.integer("n_routed_experts"),
        chosen=config.integer("num_experts_per_tok"),
        inner=inner,
        activation=mlp.activation,
        weight_scale=config.number("routed_scaling_factor", 1.0),
        shared=_shared(replace(mlp, inner=inner), config.integer("n_shared_experts")),
    )


def _shared(one: MLPSpec, count: int) -> MLPSpec | None:
    return replace(one, inner=one.inner * count) if count else None


def _layers(
    attention: MLASpec, mlp: MLPSpec, experts: ExpertsSpec, norm: NormSpec, dense: int, count: int
) -> list[LayerSpec]:
    """Make ``count`` layers: the first ``dense`` with ``mlp``, the others with ``experts``."""
    networks = [mlp if i < dense else experts for i in range(count)]
    return [LayerSpec(attention=attention, mlp=n, before_attention=norm, before_mlp=norm) for n in networks]


def _scale(head_dim: int, rope: RopeSpec, mscale_all_dim: float) -> float:
    """Return the factor of attention scores: 1/sqrt(``head_dim``), made larger for a context that YaRN stretches.

    ``mscale_all_dim``: YaRN's setting for how much larger (Peng et al., 2023); 0: not at all. Here the factor applies
    to the scores of all elements, not to those of the rotated ones alone.
    """
    stretched = rope.factor if rope.type is not RopeType.DEFAULT else 1.0
    sharper = 0.1 * mscale_all_dim * math.log(stretched) + 1.0 if stretched > 1 else 1.0
    return float(head_dim**-0.5 * sharper * sharper)


def _is_absorbed(config: GGUFConfig) -> bool:
    return config.get("attention.key_length_mla") is not None


def _expect(config: HFConfig, key: str, value: object) -> None:
    """Raise ``UnsupportedModel`` if the config has ``key`` with another value than ``value``. It may lack the key."""
    given = config.get(key)
    if given not in (None, value):
        raise UnsupportedModel(f"{key} {given!r} is not supported for a {config.family!r} model")
