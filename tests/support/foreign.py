"""Tiny random models of families that pdserve lacks, of odd sizes, with every feature that the family has."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers

from .families import SHAPE
from .model_harness import CONTEXT, VOCAB, draw_weights

GPT2: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": CONTEXT}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48}
SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "stablelm": ("StableLm", SHAPE | {"use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True}),
    "starcoder2": ("Starcoder2", SHAPE | {"sliding_window": 19}),
    "cohere2": ("Cohere2", SHAPE | {"sliding_window": 21, "num_hidden_layers": 5, "logit_scale": 0.3}),
    "gpt-neox": ("GPTNeoX", SHAPE | {"use_parallel_residual": False}),
    "gpt2": ("GPT2", GPT2),
    "gemma": ("Gemma", SHAPE | {"head_dim": 16, "num_key_value_heads": 1}),
    "exaone4": ("Exaone4", SHAPE | {"sliding_window": 13, "sliding_window_pattern": 3}),
    "olmoe": ("Olmoe", SHAPE | EXPERTS | {"norm_topk_prob": True}),
}
"""Name → transformers' prefix of the classes, and the config's fields."""


def make_foreign(name: str, fields: dict[str, Any]) -> torch.nn.Module:
    """Make the model ``nameForCausalLM`` of transformers, with random parameters."""
    config = getattr(transformers, f"{name}Config")(**copy.deepcopy(fields), attn_implementation="eager")
    suffix = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    return draw_weights(getattr(transformers, f"{name}{suffix}")(config))
