"""Writes a model of transformers as a GGUF file, by the conventions of llama.cpp's converter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

ARCHS = {
    "mistral": "llama",
    "gemma3_text": "gemma3",
    "glm": "chatglm",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
}
"""GGUF architecture by ``model_type``, if it has another name."""
PERMUTED = ("llama", "granite", "smollm3")


def write_gguf(
    model: Any,
    path: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    *,
    fuse_qkv: bool = False,
    more: Mapping[str, Any] | None = None,
    kinds: Mapping[str, GGMLQuantizationType] | None = None,
    expanded: bool = False,
) -> Path:
    """Write ``model`` as a GGUF file and return its path.

    Matrices are of ``kind``; those named in ``kinds`` have a kind of their own. ``fuse_qkv``: q, k and v in one tensor,
    as in files of ChatGLM. ``more``: further metadata. ``expanded``: latent attention as in files from before
    llama.cpp's absorbed form.
    """
    config = model.config
    arch = ARCHS.get(config.model_type, config.model_type)
    writer = GGUFWriter(path, arch)
    _add_metadata(writer, config, arch)
    if arch == "deepseek2":
        _add_latent(writer, config, expanded)
    _add_rope(writer, config, arch)
    for key, value in (more or {}).items():
        types = {str: GGUFValueType.STRING, bool: GGUFValueType.BOOL, float: GGUFValueType.FLOAT32}
        writer.add_key_value(f"{arch}.{key}", value, types.get(type(value), GGUFValueType.UINT32))
    archs = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    # The table of ChatGLM knows only the names of its own checkpoints.
    names = gguf.get_tensor_name_map(archs["llama" if arch == "chatglm" else arch], config.num_hidden_layers)
    state = _split_experts({name: tensor.numpy() for name, tensor in model.state_dict().items()}, arch)
    if arch == "deepseek2":
        state = _split_latent(state, config, expanded)
    if config.tie_word_embeddings:
        state.pop("lm_head.weight")
    if fuse_qkv:
        _fuse_qkv(state)
    for name, values in state.items():
        theirs = _name(names, name)
        values = _converted(name, values, config, arch)
        is_matrix = values.ndim >= 2 and theirs.endswith(".weight") and "ffn_gate_inp" not in theirs
        own = next((own for part, own in (kinds or {}).items() if part in theirs), kind)
        if is_matrix and own != GGMLQuantizationType.F32:
            writer.add_tensor(theirs, gguf.quantize(values, own), raw_dtype=own)
        else:
            writer.add_tensor(theirs, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _name(names: gguf.TensorNameMap, name: str) -> str:
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
        bare, suffix = name.rsplit(".", 1)
        layer, part = bare.removeprefix("model.layers.").split(".", 1)
        parts = {"mlp.gate_up_proj": "ffn_up", "self_attn.qkv_proj": "attn_qkv"}
        found = f"blk.{layer}.{parts[part]}.{suffix}"
    return found


def _converted(name: str, values: np.ndarray, config: Any, arch: str) -> np.ndarray:
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return values + 1.0
    part = name.split(".")[-2]
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    if arch in PERMUTED and part in heads:
        by_half = values.reshape(heads[part], 2, -1, *values.shape[1:])
        return np.ascontiguousarray(by_half.swapaxes(1, 2).reshape(values.shape))
    return values


def _split_experts(state: dict[str, np.ndarray], arch: str) -> dict[str, np.ndarray]:
    """Split the tensors that transformers has for all experts in one, with gate and up apart."""
    split: dict[str, np.ndarray] = {}
    for name, values in state.items():
        if ".mlp.experts." not in name:
            split[name if not name.endswith("sinks") else f"{name}.weight"] = values
            continue
        start, _, part = name.rpartition(".")
        kind = "bias" if part.endswith("_bias") else "weight"
        rows = values.swapaxes(1, 2) if arch == "gpt-oss" and kind == "weight" else values
        if not part.startswith("gate_up"):
            split[f"{start}.down_proj.{kind}"] = np.ascontiguousarray(rows)
            continue
        half = rows.shape[1] // 2
        gate, up = (rows[:, ::2], rows[:, 1::2]) if arch == "gpt-oss" else (rows[:, :half], rows[:, half:])
        split[f"{start}.gate_proj.{kind}"] = np.ascontiguousarray(gate)
        split[f"{start}.up_proj.{kind}"] = np.ascontiguousarray(up)
    return split


def _split_latent(state: dict[str, np.ndarray], config: Any, expanded: bool) -> dict[str, np.ndarray]:
    """Split kv_b of latent attention into two stacks of a matrix for each head; that of the keys is transposed."""
    split: dict[str, np.ndarray] = {}
    for name, values in state.items():
        if expanded or not name.endswith("kv_b_proj.weight"):
            split[name.replace("e_score_correction_bias", "e_score_correction.bias")] = values
            continue
        by_head = values.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
        keys, values_of = np.split(by_head, [config.qk_nope_head_dim], axis=1)
        split[name.replace("kv_b_proj", "k_b_proj")] = np.ascontiguousarray(keys.swapaxes(1, 2))
        split[name.replace("kv_b_proj", "v_b_proj")] = np.ascontiguousarray(values_of)
    return split


def _fuse_qkv(state: dict[str, np.ndarray]) -> None:
    for name in [name for name in state if ".q_proj." in name]:
        parts = [state.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        state[name.replace("q_proj", "qkv_proj")] = np.concatenate(parts)


def _add_metadata(writer: GGUFWriter, config: Any, arch: str) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    if arch != "deepseek2":
        writer.add_head_count_kv(config.num_key_value_heads)
    _add_experts(writer, config, arch)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if arch != "deepseek2" and head_dim * config.num_attention_heads != config.hidden_size:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if arch in ("gemma2", "gemma3", "phi3", "gpt-oss"):
        writer.add_sliding_window(config.sliding_window or 0)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)


def _add_experts(writer: GGUFWriter, config: Any, arch: str) -> None:
    count = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if not count:
        return
    writer.add_expert_count(count)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if arch != "llama":
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
    if arch == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _add_latent(writer: GGUFWriter, config: Any, expanded: bool) -> None:
    """Add the metadata of latent attention: of one head in the absorbed form, or by head if ``expanded``."""
    key_length = config.qk_nope_head_dim + config.qk_rope_head_dim
    if expanded:
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(key_length)
        writer.add_value_length(config.v_head_dim)
    else:
        writer.add_head_count_kv(1)
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(key_length)
        writer.add_value_length_mla(config.v_head_dim)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    is_sigmoid = config.model_type == "deepseek_v3"
    writer.add_expert_weights_norm(is_sigmoid and config.norm_topk_prob)
    gating = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(gating.SIGMOID if is_sigmoid else gating.SOFTMAX)
    if config.n_group:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)


def _add_rope(writer: GGUFWriter, config: Any, arch: str) -> None:
    rope = config.rope_parameters
    if "full_attention" in rope:
        # The other layers' base is what llama.cpp takes it for.
        assert rope["sliding_attention"] == {"rope_type": "default", "rope_theta": 10000.0}
        rope = rope["full_attention"]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(rope["rope_theta"])
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn" and arch == "deepseek2":
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    if kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "longrope":
        original = rope["original_max_position_embeddings"]
        scale = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], dtype=np.float32))
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, size))


def _llama3_factors(rope: dict[str, float], size: int) -> np.ndarray:
    """Return the divisor of each frequency."""
    wave = 2 * math.pi * rope["rope_theta"] ** (torch.arange(0, size, 2).double() / size)
    original, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = (original / wave - low) / (high - low)
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    factors = torch.where(wave < original / high, 1.0, torch.where(wave > original / low, rope["factor"], between))
    return factors.float().numpy()
