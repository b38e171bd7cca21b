"""Shapes of the models to measure, and the speed that is asked of each."""

from __future__ import annotations

from typing import Literal, NamedTuple

COMMON: dict[str, object] = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "hidden_act": "silu"},
    **{"rope_theta": 500000.0, "max_position_embeddings": 8192, "torch_dtype": "bfloat16", "bos_token_id": 1},
    "eos_token_id": 2,
}
BLOCKS: dict[str, object] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
AWQ: dict[str, object] = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
PACKED_SHAPES: dict[str, tuple[dict[str, object], Literal["packed", "w8a8"]]] = {
    "8B in FP8 blocks": (BLOCKS, "packed"),
    "8B in FP8 blocks by FP8": (BLOCKS, "w8a8"),
    "8B in four bits": (AWQ, "packed"),
}


class Shape(NamedTuple):
    """A model's sizes, and what is asked of it: of the copying rate by batch size, of the multiplying rate by a prompt.

    ``prompt``: tokens. ``quantization``: of the server's options, by Triton alone if it is not "none".
    """

    name: str
    config: dict[str, object]
    context: int
    prompt: int
    asked: dict[int, float]
    asked_of_prompt: float | None = None
    quantization: Literal["none", "packed", "w8a8"] = "none"


def shape_called(name: str, dry_run: bool) -> Shape:
    """Return the shape "1B" (Llama 3.2's sizes), "8B" (Llama 3.1's) or one of ``PACKED_SHAPES``.

    A dry run's is tiny.
    """
    if name in PACKED_SHAPES:
        how, use = PACKED_SHAPES[name]
        config = shape_called("8B", dry_run).config | {"quantization_config": how}
        if dry_run:
            return Shape(name, config, 8, 16, {1: 0.0, 2: 0.0}, None, use)
        return Shape(name, config, 1024, 2048, {1: 0.0, 8: 0.0, 64: 0.0}, None, use)
    if dry_run:
        tiny = sizes(64, 128, 2, 4, 2, 512, head_dim=64)
        return Shape(name, tiny, 64, 64, {1: 0.0, 2: 0.0})
    if name == "1B":
        small = sizes(2048, 8192, 16, 32, 8, 128_256, head_dim=64, tied=True)
        return Shape(name, small, 1024, 2048, {1: 0.7, 16: 0.0, 64: 0.0})
    large = sizes(4096, 14336, 32, 32, 8, 128_256)
    return Shape(name, large, 1024, 2048, {1: 0.8, 8: 0.8, 64: 0.8}, 0.6)


def config_of(shape: Shape) -> dict[str, object]:
    """Return the content of the config.json of a model of ``shape``."""
    return COMMON | shape.config


def sizes(
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    *,
    head_dim: int = 0,
    tied: bool = False,
) -> dict[str, object]:
    """Return the fields of config.json that name sizes. ``head_dim`` 0: hidden size by heads.

    ``tied``: the output head shares the embedding's weights.
    """
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "head_dim": head_dim or hidden // heads,
        "tie_word_embeddings": tied,
    }
