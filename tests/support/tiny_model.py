"""A tiny random Llama with weights that the servers draw, or that were drawn for them."""

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


def drawn_args(folder: Path) -> list[str]:
    """Write the model with the weights that servers would draw; flags that serve it in float32.

    Servers that draw weights import torch for them. That takes longer than all else of their start.
    """
    from safetensors.numpy import save_file

    from pdserve.model_files.model_path import resolve_model
    from pdserve.model_files.spec_reader import read_spec
    from pdserve.model_files.tensor_names import find_parts
    from pdserve.model_runner.loader.dummy_weights import DummyWeights
    from pdserve.model_runner.loader.host_model import weight_shapes

    args = tiny_args(folder)
    spec = read_spec(resolve_model(str(folder), weights=False))
    theirs = {part.name: name for name in tensor_names(spec.num_layers) for part in find_parts(spec, name)}
    drawn = DummyWeights(weight_shapes(spec), seed=0).tensors()
    save_file({theirs[name]: values for name, values in drawn}, folder / "model.safetensors")
    at = args.index("--load-format")
    return args[:at] + args[at + 2 :]


def tensor_names(layers: int) -> list[str]:
    """Return the names of a Llama's tensors in checkpoints."""
    attention = [f"self_attn.{name}_proj" for name in "qkvo"]
    of_layer = ["input_layernorm", "post_attention_layernorm", *attention]
    of_layer += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    return [
        *("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"),
        *(f"model.layers.{layer}.{name}.weight" for layer in range(layers) for name in of_layer),
    ]
