"""A tiny random Llama with weights that the servers draw."""

from __future__ import annotations

from pathlib import Path

CONFIG = {
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


def tiny_args(folder: Path, **sizes: int) -> list[str]:
    """Write its config into ``folder``, of other ``sizes`` where they are given; flags that serve it in float32, with a
    real tokenizer.
    """
    from transformers import LlamaConfig

    config = LlamaConfig(**(CONFIG | sizes))
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return ["--model-path", str(folder), "--load-format", "dummy", "--tokenizer-path", "smollm2", "--dtype", "float32"]
