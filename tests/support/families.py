"""Tiny random models of every family, of odd sizes, with every feature that the family has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

from .model_harness import CONTEXT, VOCAB, draw_weights

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 82,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
}
WIDE = SHAPE | {"hidden_size": 40, "intermediate_size": 54, "num_attention_heads": 4, "num_key_value_heads": 1}
"""Of another head_dim where one is given, as hidden_size / heads is 10."""
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
TWO_ROPES = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}


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
GEMMA2 = {"query_pre_attn_scalar": 30, "sliding_window": 21, "attn_logit_softcapping": 5.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SHAPE | {"tie_word_embeddings": True}),
    "llama-biased": ("Llama", WIDE | {"head_dim": 14, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    "llama-llama3": ("Llama", SHAPE | {"rope_parameters": LLAMA3}),
    "llama-linear": ("Llama", SHAPE | {"rope_parameters": LINEAR}),
    "llama-yarn": ("Llama", SHAPE | {"rope_parameters": YARN}),
    "llama-yarn-mscale": (
        "Llama",
        SHAPE | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False, "beta_fast": 8}},
    ),
    "llama-yarn-factor": ("Llama", SHAPE | {"rope_parameters": YARN | {"attention_factor": 1.3}}),
    "llama-longrope": ("Llama", SHAPE | {"rope_parameters": longrope(4, factor=4.0)}),
    "mistral": ("Mistral", SHAPE | {"sliding_window": None, "head_dim": 16}),
    "mistral-window": ("Mistral", WIDE | {"sliding_window": 37, "head_dim": 14, "rope_parameters": PLAIN}),
    "smollm3": ("SmolLM3", SHAPE | {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    "smollm3-window": (
        "SmolLM3",
        WIDE
        | {
            "no_rope_layers": [0, 1, 1],
            "use_sliding_window": True,
            "sliding_window": 19,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": YARN,
        },
    ),
    "qwen2": ("Qwen2", SHAPE),
    "qwen2-window": (
        "Qwen2",
        WIDE | {"use_sliding_window": True, "sliding_window": 23, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "qwen3": ("Qwen3", SHAPE | {"head_dim": 16}),
    "qwen3-window": (
        "Qwen3",
        WIDE
        | {
            "head_dim": 18,
            "use_sliding_window": True,
            "sliding_window": 11,
            "max_window_layers": 0,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "attention_bias": True,
            "rope_parameters": YARN,
        },
    ),
    "gemma2": ("Gemma2", SHAPE | GEMMA2 | {"head_dim": 16, "final_logit_softcapping": 3.0}),
    "gemma2-uncapped": (
        "Gemma2",
        WIDE
        | {
            "head_dim": 14,
            "query_pre_attn_scalar": 9,
            "sliding_window": 70,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": (
        "Gemma3",
        SHAPE
        | {
            "num_hidden_layers": 7,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 21,
            "rope_parameters": TWO_ROPES,
        },
    ),
    "gemma3-few": (
        "Gemma3",
        WIDE
        | {
            "head_dim": 14,
            "query_pre_attn_scalar": 14,
            "sliding_window": 40,
            "sliding_window_pattern": 2,
            "final_logit_softcapping": 4.0,
        },
    ),
    "phi3": ("Phi3", SHAPE | {"rope_parameters": PLAIN, "sliding_window": 33}),
    "phi3-long": (
        "Phi3",
        SHAPE
        | {
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "original_max_position_embeddings": 64,
            "rope_parameters": longrope(6, partial_rotary_factor=0.75),
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": ("Olmo2", SHAPE | {"rope_parameters": PLAIN}),
    "olmo2-biased": (
        "Olmo2",
        WIDE | {"num_key_value_heads": 4, "attention_bias": True, "rope_parameters": YARN, "tie_word_embeddings": True},
    ),
    "granite": ("Granite", SHAPE | GRANITE),
    "granite-biased": (
        "Granite",
        WIDE | GRANITE | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "glm4": ("Glm4", SHAPE | {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "glm4-odd": (
        "Glm4",
        WIDE | {"head_dim": 14, "attention_bias": False, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.3}},
    ),
    "glm": ("Glm", SHAPE | {"head_dim": 20, "partial_rotary_factor": 0.5}),
    "glm-whole": ("Glm", WIDE | {"head_dim": 10, "partial_rotary_factor": 1.0, "tie_word_embeddings": True}),
}


def make_config(name: str, **changes: Any) -> Any:
    """The config of transformers."""
    family, fields = FAMILIES[name]
    text = "Text" if family == "Gemma3" else ""
    config: Callable[..., Any] = getattr(transformers, f"{family}{text}Config")
    # The plain attention: the only one that caps.
    return config(**fields | changes, attn_implementation="eager")


def make_reference(name: str, **changes: Any) -> torch.nn.Module:
    """The model of transformers, every parameter drawn."""
    model: Callable[..., torch.nn.Module] = getattr(transformers, f"{FAMILIES[name][0]}ForCausalLM")
    return draw_weights(model(make_config(name, **changes)))
