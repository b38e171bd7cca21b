"""Shared by the end-to-end tests."""

from __future__ import annotations

from pathlib import Path

import pytest

TINY = {
    "vocab_size": 49152,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # With the embeddings as its head, a random model repeats the last token, whatever came before it.
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A folder with a tiny random Llama's config; the servers draw its weights (``--load-format dummy``)."""
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("tiny")
    config = LlamaConfig(**TINY)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_args(tiny_model) -> list[str]:
    """Flags that serve the tiny model, with a real tokenizer."""
    return [
        "--model-path",
        str(tiny_model),
        "--load-format",
        "dummy",
        "--tokenizer-path",
        "smollm2",
        "--dtype",
        "float32",
    ]
