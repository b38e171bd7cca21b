"""Configs as models on the hub have them, older spellings and keys left out, read as transformers reads them."""

from __future__ import annotations

import copy
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import make_reference
from support.model_harness import Harness, close, draw, reference_logits
from transformers import AutoConfig

from pdserve.model_files.context_length import with_context, without_idle_windows
from pdserve.model_files.errors import UnsupportedModel
from pdserve.model_files.families.registry import spec_from_hf
from pdserve.model_files.rope_frequencies import attention_factor, inverse_frequencies
from pdserve.model_files.spec import ExpertsSpec, MLASpec, ModelSpec


def sizes(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, context: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
        "vocab_size": 1000,
    }


LLAMA3 = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
FACTORS = {"short_factor": [1.0 + i / 50 for i in range(48)], "long_factor": [1.0 + i for i in range(48)]}
GEMMA3_4B = {
    "model_type": "gemma3_text",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    **sizes(2880, 2880, 24, 64, 8, 131072),
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "initial_context_length": 4096,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "num_experts_per_tok": 4,
    "num_local_experts": 32,
    "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
    "rms_norm_eps": 1e-5,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
}
GPT_OSS_YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "rope_type": "yarn",
    "truncate": False,
}
DEEPSEEK = {
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "pretraining_tp": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_theta": 10000,
    "seq_aux": True,
    "v_head_dim": 128,
}
DEEPSEEK_YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama 2": {"model_type": "llama", **sizes(4096, 11008, 32, 32, 32, 4096), "pretraining_tp": 1},
    "Llama 3.2": {
        "model_type": "llama",
        **sizes(2048, 8192, 16, 32, 8, 131072),
        "head_dim": 64,
        "rope_scaling": LLAMA3,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    "SmolLM2": {
        "model_type": "llama",
        **sizes(576, 1536, 30, 9, 3, 8192),
        "is_llama_config": True,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
    },
    "SmolLM3": {
        "model_type": "smollm3",
        **sizes(2048, 11008, 36, 16, 4, 65536),
        "no_rope_layers": [1, 1, 1, 0] * 9,
        "no_rope_layer_interval": 4,
        "layer_types": ["full_attention"] * 36,
        "max_window_layers": 28,
        "use_sliding_window": False,
        "sliding_window": None,
        "rope_theta": 5000000.0,
    },
    "Mistral 0.1": {"model_type": "mistral", **sizes(4096, 14336, 32, 32, 8, 32768), "sliding_window": 4096},
    "Qwen2.5": {
        "model_type": "qwen2",
        **sizes(896, 4864, 24, 14, 2, 32768),
        "max_window_layers": 24,
        "sliding_window": 32768,
        "use_sliding_window": False,
        "rope_theta": 1000000.0,
    },
    "Qwen2.5 stretched": {
        "model_type": "qwen2",
        **sizes(896, 4864, 24, 14, 2, 32768),
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        "rope_theta": 1000000.0,
    },
    "Qwen3": {
        "model_type": "qwen3",
        **sizes(1024, 3072, 28, 16, 8, 40960),
        "head_dim": 128,
        "max_window_layers": 28,
        "sliding_window": None,
        "use_sliding_window": False,
        "rope_theta": 1000000,
    },
    "Gemma 2 2B": {
        "model_type": "gemma2",
        **sizes(2304, 9216, 26, 8, 4, 8192),
        "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
    },
    "Gemma 3 1B": {
        "model_type": "gemma3_text",
        **sizes(1152, 6912, 26, 4, 1, 32768),
        "attn_logit_softcapping": None,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    "Gemma 3 4B": GEMMA3_4B,
    "Phi-3 4k": {"model_type": "phi3", **sizes(3072, 8192, 32, 32, 32, 4096), "sliding_window": 2047},
    "Phi-3 128k": {
        "model_type": "phi3",
        **sizes(3072, 8192, 32, 32, 32, 131072),
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "longrope", **FACTORS},
        "sliding_window": 262144,
    },
    "Phi-4 mini": {
        "model_type": "phi3",
        **sizes(3072, 8192, 32, 24, 8, 131072),
        "attention_bias": False,
        "full_attn_mod": 1,
        "lm_head_bias": False,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
        "rope_scaling": {"type": "longrope", **FACTORS},
        "sliding_window": 262144,
        "tie_word_embeddings": True,
    },
    "OLMo 2": {"model_type": "olmo2", **sizes(2048, 8192, 16, 16, 16, 4096), "rope_theta": 500000},
    "OLMo 3": {
        "model_type": "olmo3",
        **sizes(4096, 11008, 32, 32, 32, 65536),
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "yarn",
        },
        "rope_theta": 500000,
        "sliding_window": 4096,
    },
    "OLMo 3 by defaults": {"model_type": "olmo3", **sizes(4096, 11008, 32, 32, 32, 2048)},
    "Granite 3.1": {
        "model_type": "granite",
        **sizes(2048, 8192, 40, 32, 8, 131072),
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "logits_scaling": 8.0,
        "residual_multiplier": 0.22,
        "rope_theta": 5000000.0,
    },
    "GLM-4": {
        "model_type": "glm4",
        **sizes(4096, 13696, 40, 32, 2, 32768),
        "attention_bias": False,
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
    },
    "Mixtral 8x7B": {
        "model_type": "mixtral",
        **sizes(4096, 14336, 32, 32, 8, 32768),
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "Mixtral by defaults": {
        "model_type": "mixtral",
        **sizes(4096, 14336, 32, 32, 8, 32768),
        "num_local_experts": 8,
    },
    "Qwen1.5-MoE": {
        "model_type": "qwen2_moe",
        **sizes(2048, 5632, 24, 16, 16, 8192),
        "decoder_sparse_step": 1,
        "max_window_layers": 21,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "rope_theta": 1000000.0,
        "shared_expert_intermediate_size": 5632,
        "sliding_window": 32768,
        "use_sliding_window": False,
    },
    "Qwen2-MoE with windows": {
        "model_type": "qwen2_moe",
        **sizes(2048, 5632, 24, 16, 16, 8192),
        "max_window_layers": 9,
        "num_experts": 60,
        "sliding_window": 500,
        "use_sliding_window": True,
    },
    "Qwen3 30B-A3B": {
        "model_type": "qwen3_moe",
        **sizes(2048, 6144, 48, 32, 4, 40960),
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "GPT-OSS 20B": GPT_OSS | {"rope_scaling": GPT_OSS_YARN, "rope_theta": 150000},
    "GPT-OSS by defaults": GPT_OSS,
    "DeepSeek-V2-Lite": {
        "model_type": "deepseek_v2",
        **sizes(2048, 10944, 27, 16, 16, 163840),
        **DEEPSEEK,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_experts_per_tok": 6,
        "q_lora_rank": None,
        "rope_scaling": DEEPSEEK_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_group": 1,
        "topk_method": "greedy",
    },
    "DeepSeek-V3": {
        "model_type": "deepseek_v3",
        **sizes(7168, 18432, 61, 128, 128, 163840),
        **DEEPSEEK,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "rope_scaling": DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 4,
        "topk_method": "noaux_tc",
    },
    "GLM-4 of 2024": {"model_type": "glm", **sizes(4096, 13696, 40, 32, 2, 131072), "head_dim": 128},
}


def frequencies(raw: dict[str, Any]) -> list[tuple[torch.Tensor, float]]:
    """Return transformers' frequencies and scaling of each rope, of the short context if there are two."""
    package = raw["model_type"].removesuffix("_text")
    module = import_module(f"transformers.models.{package}.modeling_{package}")
    [name] = [name for name in vars(module) if name.endswith("RotaryEmbedding")]
    rotary = getattr(module, name)(AutoConfig.for_model(**copy.deepcopy(raw)))
    if hasattr(rotary, "sliding_attention_inv_freq"):
        kinds = ("full_attention", "sliding_attention")
        return [(getattr(rotary, f"{kind}_inv_freq"), getattr(rotary, f"{kind}_attention_scaling")) for kind in kinds]
    return [(rotary.inv_freq, rotary.attention_scaling)]


@pytest.mark.parametrize("name", list(CONFIGS))
def test_ropes_and_windows_are_those_of_transformers(name: str) -> None:
    raw = CONFIGS[name]
    spec, config = spec_from_hf(raw), AutoConfig.for_model(**copy.deepcopy(raw))
    short = with_context(spec, min(spec.ropes[0].original_context or spec.context_length, spec.context_length))
    for rope, (inv_freq, scaling) in zip(short.ropes, frequencies(raw), strict=True):
        torch.testing.assert_close(torch.from_numpy(inverse_frequencies(rope)), inv_freq)
        assert attention_factor(rope) == pytest.approx(scaling)
    window = config.sliding_window if hasattr(config, "sliding_window") else None
    types = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * 99
    expected = [window if kind == "sliding_attention" else None for kind in types[: spec.num_layers]]
    assert [getattr(layer.attention, "window", None) for layer in spec.layers] == expected
    attention = spec.layers[0].attention
    kv_heads = 1 if isinstance(attention, MLASpec) else config.num_key_value_heads
    assert (attention.heads, attention.kv_heads) == (config.num_attention_heads, kv_heads)
    assert spec.final_norm.eps == config.rms_norm_eps
    assert (spec.tied_head, spec.vocab_size) == (config.tie_word_embeddings, config.vocab_size)


@pytest.mark.parametrize(
    "name",
    ["Mixtral 8x7B", "Mixtral by defaults", "Qwen1.5-MoE", "Qwen2-MoE with windows", "Qwen3 30B-A3B", "GPT-OSS 20B"],
)
def test_experts_are_those_of_transformers(name: str) -> None:
    raw = CONFIGS[name]
    spec, config = spec_from_hf(raw), AutoConfig.for_model(**copy.deepcopy(raw))
    for layer in spec.layers:
        experts = layer.mlp
        assert isinstance(experts, ExpertsSpec)
        assert (experts.count, experts.chosen) == (
            config.num_local_experts if "GPT" in name else config.num_experts,
            config.num_experts_per_tok,
        )
        assert experts.inner == getattr(config, "moe_intermediate_size", config.intermediate_size)
        assert experts.normalised == getattr(config, "norm_topk_prob", True)
        assert experts.limit == getattr(config, "swiglu_limit", None)
        assert (experts.shared.inner if experts.shared else None) == getattr(
            config, "shared_expert_intermediate_size", None
        )
    assert spec.layers[0].attention.qkv_bias == (not name.startswith(("Mixtral", "Qwen3")))
    assert spec.layers[0].attention.sinks == ("GPT" in name)


@pytest.mark.parametrize("name", ["DeepSeek-V2-Lite", "DeepSeek-V3"])
def test_latent_attention_and_experts_are_those_of_transformers(name: str) -> None:
    raw = CONFIGS[name]
    package = raw["model_type"]
    module = import_module(f"transformers.models.{package}.modeling_{package}")
    config = AutoConfig.for_model(**copy.deepcopy(raw))
    with torch.device("meta"):
        [attends] = [name for name in vars(module) if name.endswith("Attention")]
        theirs = getattr(module, attends)(config, 0)
    spec = spec_from_hf(raw)
    attention = spec.layers[0].attention
    assert isinstance(attention, MLASpec)
    assert attention.scale == pytest.approx(theirs.scaling)
    assert (attention.q_lora_rank, attention.head_dim) == (theirs.q_lora_rank, theirs.kv_a_proj_with_mqa.out_features)
    assert theirs.kv_b_proj.out_features == attention.heads * (attention.qk_nope_head_dim + attention.v_head_dim)
    assert attention.norm.eps == theirs.kv_a_layernorm.variance_epsilon
    dense = raw["first_k_dense_replace"]
    assert [isinstance(layer.mlp, ExpertsSpec) for layer in spec.layers] == [
        i >= dense for i in range(raw["num_hidden_layers"])
    ]
    experts = spec.layers[-1].mlp
    assert isinstance(experts, ExpertsSpec)
    assert experts.shared is not None
    assert experts.shared.inner == raw["moe_intermediate_size"] * raw["n_shared_experts"]
    assert (experts.groups, experts.groups_chosen) == ((8, 4) if raw["n_group"] == 8 else (1, 1))
    assert spec.draft_layers == raw.get("num_nextn_predict_layers", 0)


def test_layers_that_predict_further_ahead_are_not_read(tmp_path: Path) -> None:
    model, tokens = make_reference("deepseek-v3", num_nextn_predict_layers=1), draw(20, 3)
    model.save_pretrained(tmp_path)
    draft = {f"model.layers.{model.config.num_hidden_layers}.eh_proj.weight": torch.ones(2, 2)}
    save_file(draft, tmp_path / "draft.safetensors")
    names = load_file(tmp_path / "model.safetensors")
    index = dict.fromkeys(names, "model.safetensors") | dict.fromkeys(draft, "draft.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    close(Harness(tmp_path, attention_backend="torch").forward((0, tokens)), reference_logits(model, tokens))


def test_a_former_name_of_longrope() -> None:
    raw = CONFIGS["Phi-3 128k"]
    assert spec_from_hf(raw | {"rope_scaling": {"type": "su", **FACTORS}}) == spec_from_hf(raw)


def test_what_a_wide_window_leaves_is_plain() -> None:
    spec = spec_from_hf(CONFIGS["Phi-4 mini"])
    assert without_idle_windows(spec).layers[0].attention.window is None


def test_the_text_of_a_model_of_texts_and_images(tmp_path: Path) -> None:
    """Under both of the prefixes that such files have had."""
    model, tokens = make_reference("gemma3"), draw(60, 3)
    expected = reference_logits(model, tokens)
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    config = {"model_type": "gemma3", "text_config": model.config.to_dict(), "vision_config": {}}
    for text, vision in (("language_model.model.", ""), ("model.language_model.", "model.")):
        folder = tmp_path / text
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        named = {name.replace("model.", text, 1): tensor.clone() for name, tensor in state.items()}
        named |= {f"{vision}vision_tower.a.weight": torch.ones(2), f"{vision}multi_modal_projector.b": torch.ones(2)}
        save_file(named, folder / "model.safetensors")
        close(Harness(folder).forward((0, tokens)), expected)


def test_a_wrapper_that_is_not_known_is_named() -> None:
    with pytest.raises(UnsupportedModel, match="architecture 'llava' is not supported"):
        spec_from_hf({"model_type": "llava", "text_config": CONFIGS["Llama 2"]})
    quantised = {"model_type": "gemma3", "text_config": GEMMA3_4B, "quantization_config": {"quant_method": "awq"}}
    with pytest.raises(UnsupportedModel, match="quantised safetensors"):
        spec_from_hf(quantised)


def test_older_and_newer_spelling_of_two_ropes() -> None:
    def read(**fields: object) -> ModelSpec:
        return spec_from_hf({"rope_scaling": None, **GEMMA3_4B, **fields})

    older = read(rope_theta=700.0, rope_local_base_freq=90.0)
    full, local = older.ropes
    assert (full.theta, full.factor, local.theta, local.factor) == (700.0, 8.0, 90.0, 1.0)
    linear = {"rope_type": "linear", "factor": 8.0, "rope_theta": 700.0}
    newer = {"full_attention": linear, "sliding_attention": {"rope_type": "default", "rope_theta": 90.0}}
    assert read(rope_scaling=None, rope_parameters=newer) == older
    with pytest.raises(UnsupportedModel, match="for all layers together are not supported"):
        read(rope_scaling=None, rope_parameters=linear)
