"""Reads ``ModelConfig`` from a GGUF file's metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf

from .config import ModelConfig, RopeConfig, RopeType
from .errors import UnsupportedModel
from .families import find_family
from .gguf_reader import GGUFFile

ROPE_TYPES = {"none": RopeType.DEFAULT, "linear": RopeType.LINEAR, "yarn": RopeType.YARN}


def read_gguf_config(path: Path) -> ModelConfig:
    """The config in the GGUF file ``path``; raises ``UnsupportedModel`` or ``InvalidWeights``."""
    file = GGUFFile(path)
    arch = str(file.metadata.get("general.architecture"))
    family = find_family(arch)
    try:
        return _to_config(file, arch, family.qk_norm)
    except KeyError as e:
        raise UnsupportedModel(f"{path} lacks the metadata {e}") from e


def _to_config(file: GGUFFile, arch: str, qk_norm: bool) -> ModelConfig:
    meta = {key.removeprefix(f"{arch}."): value for key, value in file.metadata.items() if key.startswith(f"{arch}.")}
    if meta.get("expert_count"):
        raise UnsupportedModel("mixture-of-experts models are not supported")
    heads, hidden = meta["attention.head_count"], meta["embedding_length"]
    head_dim = meta.get("attention.key_length", hidden // heads)
    if (
        meta.get("rope.dimension_count", head_dim) != head_dim
        or meta.get("attention.value_length", head_dim) != head_dim
    ):
        raise UnsupportedModel("rotary embedding of a part of each head, or values of another size, is not supported")
    context = int(meta["context_length"])
    return ModelConfig(
        model_type=arch,
        # The embedding is the truth: it may be padded beyond the vocabulary.
        vocab_size=int(file.tensors["token_embd.weight"].shape[1]),
        hidden_size=hidden,
        intermediate_size=meta["feed_forward_length"],
        num_layers=meta["block_count"],
        num_heads=heads,
        num_kv_heads=meta.get("attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=meta["attention.layer_norm_rms_epsilon"],
        context_length=context,
        rope=_rope(file, meta, context),
        tie_word_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        qk_norm=qk_norm,
    )


def _rope(file: GGUFFile, meta: dict[str, Any], context: int) -> RopeConfig:
    name = meta.get("rope.scaling.type", "none")
    if name not in ROPE_TYPES:
        raise UnsupportedModel(f"rotary scaling {name!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
    factors = file.tensors.get("rope_freqs.weight")
    values = gguf.dequantize(factors.data, factors.tensor_type).ravel().tolist() if factors is not None else ()
    return RopeConfig(
        theta=float(meta.get("rope.freq_base", 10000.0)),
        type=ROPE_TYPES[name],
        factor=float(meta.get("rope.scaling.factor", 1.0)),
        original_context=int(meta.get("rope.scaling.original_context_length", context)),
        freq_factors=tuple(values),
    )
