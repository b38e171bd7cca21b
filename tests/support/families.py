"""Tiny random models of every family, of odd sizes, with every feature of the family: the rows of docs/models.md.

A family of the product has at least two configs here. One of them has sizes that every engine can compute and two ranks
can share.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers

from .model_harness import CONTEXT, VOCAB, draw_weights

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 84,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
}
"""Sizes of which none is a power of two, and two ranks can share each; heads are hidden_size / heads, 8."""
NARROW = SHAPE | {"head_dim": 16}
"""Heads that the C++ engine can compute."""
WIDE = SHAPE | {
    "hidden_size": 40,
    "intermediate_size": 60,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 48,
}
"""Heads that are wider together than the residual, and fewer KV heads than ranks."""
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
PLAIN = {"rope_type": "default", "rope_theta": 500.0}
LOCAL = {"rope_type": "default", "rope_theta": 10000.0}
"""The only rope of layers with a window that a GGUF can mean."""


def longrope(pairs: int, **more: Any) -> dict[str, Any]:
    """Factors that differ from pair to pair."""
    return {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
        "long_factor": [1.5 + 0.7 * i for i in range(pairs)],
        "original_max_position_embeddings": 64,
        **more,
    }


GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.11,
    "residual_multiplier": 0.4,
    "logits_scaling": 0.7,
}
GEMMA2 = {"query_pre_attn_scalar": 16, "sliding_window": 21, "attn_logit_softcapping": 5.0}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 36}
BIASES = {"attention_bias": True, "mlp_bias": True}
TIED = {"tie_word_embeddings": True}

LATENT = SHAPE | {
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "q_lora_rank": 20,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 14,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "moe_intermediate_size": 20,
}
"""Latent attention and experts, of sizes that the C++ engine can compute."""
LATENT_WIDE = LATENT | {
    "hidden_size": 40,
    "intermediate_size": 60,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "q_lora_rank": None,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 32,
    "v_head_dim": 40,
}
"""More heads than read a row together, and their queries projected at once."""


class Config(NamedTuple):
    """``prefix``: of transformers' classes. ``not_in_gguf``: what of it llama.cpp's converter does not write."""

    prefix: str
    fields: dict[str, Any]
    not_in_gguf: str = ""


FAMILIES: dict[str, Config] = {
    "llama": Config("Llama", NARROW | TIED),
    "llama-biased": Config("Llama", WIDE | BIASES),
    "llama-odd": Config("Llama", WIDE | {"head_dim": 14, "intermediate_size": 55, "hidden_act": "gelu"}, "gelu"),
    "llama-llama3": Config("Llama", NARROW | {"rope_parameters": LLAMA3}),
    "llama-linear": Config("Llama", NARROW | {"rope_parameters": LINEAR}),
    "llama-yarn": Config("Llama", NARROW | {"rope_parameters": YARN}),
    "llama-yarn-mscale": Config(
        "Llama",
        NARROW | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False, "beta_fast": 8}},
        "mscale of a Llama",
    ),
    "llama-yarn-factor": Config(
        "Llama", NARROW | {"rope_parameters": YARN | {"attention_factor": 1.3}}, "attention_factor of a Llama"
    ),
    "llama-longrope": Config("Llama", NARROW | {"rope_parameters": longrope(8, factor=4.0)}, "longrope of a Llama"),
    "mistral": Config("Mistral", NARROW | {"sliding_window": None}),
    "mistral-window": Config(
        "Mistral", WIDE | {"sliding_window": 37, "rope_parameters": PLAIN}, "the window of a Mistral"
    ),
    "smollm3": Config("SmolLM3", NARROW | BIASES | TIED | {"num_hidden_layers": 5}),
    "smollm3-window": Config(
        "SmolLM3",
        WIDE
        | {
            "no_rope_layers": [0, 1, 1],
            "use_sliding_window": True,
            "sliding_window": 19,
            "rope_parameters": YARN,
            "tie_word_embeddings": False,
        },
        "which layers of a SmolLM3 know positions, and its window",
    ),
    "qwen2": Config("Qwen2", NARROW),
    "qwen2-window": Config(
        "Qwen2",
        WIDE | TIED | {"use_sliding_window": True, "sliding_window": 23, "max_window_layers": 1},
        "the window of a Qwen",
    ),
    "qwen3": Config("Qwen3", NARROW),
    "qwen3-window": Config(
        "Qwen3",
        WIDE
        | {
            "use_sliding_window": True,
            "sliding_window": 11,
            "max_window_layers": 0,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "attention_bias": True,
            "rope_parameters": YARN,
        },
        "the window of a Qwen",
    ),
    "gemma2": Config("Gemma2", NARROW | GEMMA2 | TIED | {"final_logit_softcapping": 3.0}),
    "gemma2-uncapped": Config(
        "Gemma2",
        WIDE
        | {
            "query_pre_attn_scalar": 60,
            "sliding_window": 70,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
        "the scale of a Gemma's scores, or that it caps nothing",
    ),
    "gemma3": Config(
        "Gemma3",
        NARROW
        | {
            "num_hidden_layers": 7,
            "query_pre_attn_scalar": 16,
            "sliding_window": 21,
            "rope_parameters": {"full_attention": LINEAR, "sliding_attention": LOCAL},
        },
    ),
    "gemma3-few": Config(
        "Gemma3",
        WIDE
        | {
            "query_pre_attn_scalar": 70,
            "sliding_window": 40,
            "sliding_window_pattern": 2,
            "final_logit_softcapping": 4.0,
            "rope_parameters": {"full_attention": PLAIN, "sliding_attention": LOCAL | {"rope_theta": 50.0}},
        },
        "which layers of a Gemma 3 have a window",
    ),
    "phi3": Config("Phi3", NARROW | {"rope_parameters": PLAIN, "sliding_window": 33}),
    "phi3-long": Config(
        "Phi3",
        NARROW
        | TIED
        | {
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "original_max_position_embeddings": 64,
            "rope_parameters": longrope(6, partial_rotary_factor=0.75),
        },
    ),
    "olmo2": Config("Olmo2", NARROW | TIED | {"rope_parameters": YARN}),
    "olmo2-biased": Config(
        "Olmo2",
        WIDE | {"num_key_value_heads": 4, "attention_bias": True, "rope_parameters": PLAIN},
        "biases of an OLMo 2",
    ),
    "olmo3": Config(
        "Olmo3",
        NARROW
        | {
            "num_hidden_layers": 5,
            "sliding_window": 21,
            "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN},
        },
    ),
    "olmo3-few": Config(
        "Olmo3",
        WIDE
        | TIED
        | {
            "sliding_window": 40,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "attention_bias": True,
            "rope_parameters": {"full_attention": LINEAR, "sliding_attention": LOCAL | {"rope_theta": 50.0}},
        },
    ),
    "granite": Config("Granite", NARROW | GRANITE),
    "granite-biased": Config("Granite", WIDE | GRANITE | BIASES | TIED),
    "glm4": Config("Glm4", NARROW | {"partial_rotary_factor": 0.5}),
    "glm4-odd": Config(
        "Glm4", WIDE | {"attention_bias": False, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.3}}
    ),
    "glm": Config("Glm", NARROW | {"head_dim": 32, "partial_rotary_factor": 0.5}),
    "glm-whole": Config("Glm", WIDE | TIED | {"partial_rotary_factor": 1.0}),
    "mixtral": Config("Mixtral", NARROW | {"num_local_experts": 5, "intermediate_size": 44}),
    "mixtral-window": Config(
        "Mixtral",
        WIDE
        | TIED
        | {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 29, "rope_parameters": PLAIN},
        "the window of a Mixtral",
    ),
    "qwen2-moe": Config("Qwen2Moe", NARROW | EXPERTS | {"shared_expert_intermediate_size": 52}),
    "qwen2-moe-window": Config(
        "Qwen2Moe",
        WIDE
        | TIED
        | EXPERTS
        | {
            "num_experts_per_tok": 5,
            "shared_expert_intermediate_size": 20,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 31,
        },
        "that weights of a Qwen2-MoE are normalised, or which of its layers have experts",
    ),
    "qwen3-moe": Config("Qwen3Moe", NARROW | EXPERTS | {"norm_topk_prob": True}),
    "qwen3-moe-sparse": Config(
        "Qwen3Moe",
        WIDE
        | TIED
        | EXPERTS
        | {
            "num_hidden_layers": 5,
            "num_experts_per_tok": 3,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 17,
            "rope_parameters": YARN,
        },
        "that weights of a Qwen3-MoE are not normalised, or which of its layers have experts",
    ),
    "gpt-oss": Config(
        "GptOss",
        NARROW
        | {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size": 44,
            "sliding_window": 21,
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
    "gpt-oss-clamped": Config(
        "GptOss",
        WIDE
        | TIED
        | {
            "num_local_experts": 3,
            "num_experts_per_tok": 3,
            "sliding_window": 40,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "attention_bias": False,
            "swiglu_limit": 0.7,
            "rope_parameters": PLAIN,
        },
        "which layers of a GPT-OSS have a window, or its limit",
    ),
    "deepseek-v2": Config(
        "DeepseekV2",
        LATENT
        | {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 0.8},
        },
    ),
    "deepseek-v2-lite": Config(
        "DeepseekV2",
        LATENT_WIDE
        | TIED
        | BIASES
        | {
            "topk_method": "greedy",
            "n_shared_experts": 2,
            "rope_parameters": YARN | {"mscale": 0.6, "mscale_all_dim": 0.9},
        },
        "biases of a DeepSeek, or unequal mscales",
    ),
    "deepseek-v3": Config(
        "DeepseekV3",
        LATENT | {"n_group": 4, "topk_group": 2, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "deepseek-v3-plain": Config(
        "DeepseekV3",
        LATENT_WIDE
        | {
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "rope_interleave": False,
            "attention_bias": True,
        },
        "biases of a DeepSeek, or halves that rotate together",
    ),
    "deepseek-v3-odd": Config(
        "DeepseekV3",
        LATENT | {"kv_lora_rank": 22, "qk_rope_head_dim": 6, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 2},
    ),
}


def make_config(name: str, **changes: Any) -> Any:
    """Make the config of transformers for a config of ``FAMILIES``, with ``changes``."""
    family, fields, _ = FAMILIES[name]
    text = "Text" if family == "Gemma3" else ""
    config: Callable[..., Any] = getattr(transformers, f"{family}{text}Config")
    # A copy: transformers writes into dictionaries that it is given. The plain attention: the only one that caps.
    return config(**copy.deepcopy(fields | changes), attn_implementation="eager")


def make_reference(name: str, **changes: Any) -> torch.nn.Module:
    """Make the model of transformers for a config of ``FAMILIES``, with random parameters."""
    model: Callable[..., torch.nn.Module] = getattr(transformers, f"{FAMILIES[name].prefix}ForCausalLM")
    return draw_weights(model(make_config(name, **changes)))
