"""Statements about heads, types, sizes and windows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .bases import VOCAB
from .checkpoint import CONFIG, SINGLE, TOKENIZER_CONFIG, Change, Checkpoint, both, drop, of_config, put, unchanged
from .pairs import all_pairs
from .variant import Axes, Variant, from_rows

TIE = "tie_word_embeddings"


def stored(heads: str) -> Change:
    """Return a change that stores the table, the head, or both."""

    def change(checkpoint: Checkpoint) -> None:
        table = next(name for name in checkpoint.tensors if name.endswith("embed_tokens.weight"))
        rest = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in (table, "lm_head.weight")}
        values = checkpoint.tensors[table]
        other = torch.randn(values.shape, generator=torch.Generator().manual_seed(5)) * 0.2
        kinds: dict[str, dict[str, Tensor]] = {
            "table": {table: values},
            "both": {table: values, "lm_head.weight": values.clone()},
            "unlike": {table: values, "lm_head.weight": other},
            "head": {"lm_head.weight": values},
            "neither": {},
        }
        checkpoint.weights[SINGLE] = rest | kinds[heads]

    return change


def as_type(dtype: torch.dtype) -> Change:
    """Return a change that stores all tensors as ``dtype``."""

    def change(checkpoint: Checkpoint) -> None:
        checkpoint.weights[SINGLE] = {name: tensor.to(dtype) for name, tensor in checkpoint.tensors.items()}

    return change


def _stated(key: str, values: Mapping[str, Any]) -> dict[str, Change]:
    return {"missing": drop(CONFIG, key)} | {label: of_config(**{key: value}) for label, value in values.items()}


def of_text(key: str, value: Any) -> Change:
    """Return a change of the ``text_config`` in config.json."""

    def change(checkpoint: Checkpoint) -> None:
        checkpoint.config["text_config"][key] = value

    return change


def not_in_text(key: str) -> Change:
    """Return a change that takes ``key`` out of the ``text_config`` in config.json."""

    def change(checkpoint: Checkpoint) -> None:
        checkpoint.config["text_config"].pop(key, None)

    return change


STORED = {heads: stored(heads) for heads in ("table", "both", "unlike", "head", "neither")}
HEADS: Axes = {TIE: _stated(TIE, {"true": True, "false": False, "null": None}), "stored": STORED}
OUTER: Axes = {
    TIE: _stated(TIE, {"true": True, "false": False}),
    "text_config": {
        "missing": not_in_text(TIE),
        "true": of_text(TIE, True),
        "false": of_text(TIE, False),
    },
    "stored": STORED,
}
TYPES: Axes = {
    key: _stated(key, {"float32": "float32", "bfloat16": "bfloat16"}) for key in ("dtype", "torch_dtype")
} | {"stored": {"float32": unchanged, "bfloat16": as_type(torch.bfloat16)}}
SIZES: Axes = {
    "vocab_size": {
        "right": unchanged,
        "of the tokenizer": of_config(vocab_size=267),
        "too large": of_config(vocab_size=VOCAB + 8),
    },
    "max_position_embeddings": {"256": unchanged, "128": of_config(max_position_embeddings=128)},
    "model_max_length": {
        "missing": unchanged,
        "32": put(TOKENIZER_CONFIG, "model_max_length", 32),
        "huge": put(TOKENIZER_CONFIG, "model_max_length", 10**30),
    },
    "num_hidden_layers": {"right": unchanged, "1": of_config(num_hidden_layers=1), "3": of_config(num_hidden_layers=3)},
}
FULL, SLIDING = "full_attention", "sliding_attention"
WINDOWS: Axes = {
    "use_sliding_window": _stated("use_sliding_window", {"true": True, "false": False}),
    "sliding_window": _stated("sliding_window", {"21": 21, "null": None}),
    "max_window_layers": _stated("max_window_layers", {"0": 0, "1": 1}),
    "layer_types": _stated("layer_types", {"full": [FULL, FULL], "one": [FULL, SLIDING], "null": None}),
}


PLAIN_ROPE = of_config(rope_parameters={"rope_type": "default", "rope_theta": 500.0})
OF_ALL: Axes = {
    "sliding_window": _stated("sliding_window", {"21": 21, "null": None}),
    "layer_types": _stated("layer_types", {"full": [FULL, FULL], "one": [FULL, SLIDING], "null": None}),
}
"""Windows of families in which all layers have one, if there is one."""


def head_variants() -> Iterator[Variant]:
    """Yield variants with all combinations of statements about heads and types, and all pairs about sizes, windows."""
    for base in ("llama", "qwen3", "gemma3_text"):
        yield from from_rows(base, "heads", HEADS, _all(HEADS))
    yield from from_rows("gemma3", "heads", OUTER, _all(OUTER))
    yield from from_rows("llama", "types", TYPES, _all(TYPES))
    yield from from_rows("llama", "sizes", SIZES, _pairs(SIZES, 5))
    for base in ("qwen3", "qwen3_moe"):
        yield from from_rows(base, "windows", WINDOWS, _pairs(WINDOWS, 6))
    for variant in [
        *from_rows("mistral", "windows", OF_ALL, _all(OF_ALL)),
        *from_rows("phi3", "windows", OF_ALL, _all(OF_ALL)),
    ]:
        yield variant._replace(change=both(PLAIN_ROPE, variant.change))


def _all(axes: Axes) -> Iterator[dict[str, str]]:
    for labels in itertools.product(*axes.values()):
        yield dict(zip(axes, labels, strict=True))


def _pairs(axes: Axes, seed: int) -> list[dict[str, str]]:
    return all_pairs({axis: list(labels) for axis, labels in axes.items()}, seed)
