"""The unchanged checkpoints: tiny random models of a few families, and a byte-level tokenizer."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from support.model_harness import draw_weights
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from .checkpoint import CONFIG, GENERATION, MAP, SINGLE, TOKENIZER, TOKENIZER_CONFIG, Checkpoint

CONTEXT, ORIGINAL = 256, 64
VOCAB = 280
"""Rows of the embeddings: more than the tokenizer has tokens, as in most published models."""
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 264,
    "eos_token_id": 265,
    "pad_token_id": 266,
}
FACTORS = {
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.2, 2.9, 3.6],
}
"""Factors of the four pairs in a head of 8 elements."""
LONGROPE = {"rope_type": "longrope", "rope_theta": 500.0, **FACTORS}
NESTED = {
    "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
GEMMA3: dict[str, Any] = SHAPE | {
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 21,
    "sliding_window_pattern": 2,
    "rope_parameters": NESTED,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w"), ("o", "r"), ("Ġw", "or"), ("a", "b"), ("1", "2")]
SPECIAL = ("<s>", "</s>", "<pad>")


def _llama() -> torch.nn.Module:
    return transformers.LlamaForCausalLM(
        _config("Llama", rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    )


def _qwen3() -> torch.nn.Module:
    return transformers.Qwen3ForCausalLM(_config("Qwen3", head_dim=8, tie_word_embeddings=True))


def _phi3() -> torch.nn.Module:
    config = _config("Phi3", rope_parameters=LONGROPE, original_max_position_embeddings=ORIGINAL)
    return transformers.Phi3ForCausalLM(config)


def _gemma3_text() -> torch.nn.Module:
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**copy.deepcopy(GEMMA3), **EAGER))


def _gemma3() -> torch.nn.Module:
    config = transformers.Gemma3Config(
        text_config=copy.deepcopy(GEMMA3), vision_config=VISION, mm_tokens_per_image=4, **EAGER
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def _glm4() -> torch.nn.Module:
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    return transformers.Glm4ForCausalLM(_config("Glm4", head_dim=8, rope_parameters=rope))


def _olmo3() -> torch.nn.Module:
    return transformers.Olmo3ForCausalLM(_config("Olmo3", sliding_window=21, rope_parameters=NESTED))


def _gpt_oss() -> torch.nn.Module:
    experts = {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 21, "head_dim": 8}
    return transformers.GptOssForCausalLM(_config("GptOss", **experts))


def _mistral() -> torch.nn.Module:
    return transformers.MistralForCausalLM(_config("Mistral", sliding_window=None))


def _qwen3_moe() -> torch.nn.Module:
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    return transformers.Qwen3MoeForCausalLM(_config("Qwen3Moe", **experts))


EAGER = {"attn_implementation": "eager"}
BASES: dict[str, Callable[[], torch.nn.Module]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "phi3": _phi3,
    "gemma3_text": _gemma3_text,
    "gemma3": _gemma3,
    "glm4": _glm4,
    "olmo3": _olmo3,
    "gpt_oss": _gpt_oss,
    "mistral": _mistral,
    "qwen3_moe": _qwen3_moe,
}
"""Functions that make the model of transformers, by the name of the base."""


@cache
def make_model(name: str) -> torch.nn.Module:
    """Make the random model of a base. Its callers must not change it."""
    return draw_weights(BASES[name]())


@cache
def make_base(name: str, folder: Path) -> Checkpoint:
    """Make the checkpoint of a base, with its weights in ``folder``. Its callers must not change it."""
    model = make_model(name)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    config = json.loads((folder / CONFIG).read_text())
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    files = {
        CONFIG: config,
        GENERATION: {"bos_token_id": 264, "eos_token_id": 265},
        TOKENIZER: json.loads(make_tokenizer().to_str()),
        TOKENIZER_CONFIG: {"tokenizer_class": "PreTrainedTokenizerFast", **names},
        MAP: dict(names),
    }
    from safetensors.torch import load_file

    return Checkpoint(files, {SINGLE: folder / SINGLE}, tensors=load_file(folder / SINGLE))


def make_tokenizer(*, special: bool = True) -> Tokenizer:
    """Make a tokenizer of all bytes, a few merges, <s> (264), </s> (265) and <pad> (266). Plain texts begin with <s>.

    ``special``: the three are added tokens, and not plain ones of the vocabulary.
    """
    tokens = [*sorted(ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    vocab = {token: i for i, token in enumerate([*tokens, *SPECIAL])}
    backend = Tokenizer(BPE(vocab, MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if special:
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 264)])
    return backend


def _config(family: str, **fields: Any) -> Any:
    make: Callable[..., Any] = getattr(transformers, f"{family}Config")
    return make(**SHAPE, **copy.deepcopy(fields), **EAGER)
