"""Statements about ropes: ``rope_scaling``, ``rope_parameters``, and what stands beside them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .bases import FACTORS, NESTED, ORIGINAL
from .checkpoint import CONFIG, drop, of_config, put, unchanged
from .pairs import all_pairs
from .variant import Axes, Variant, from_rows

YARN: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": ORIGINAL}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
THETA = {"rope_theta": 500.0}
LONGROPE: dict[str, Any] = {"rope_type": "longrope", **FACTORS}

FLAT: Axes = {
    "rope_scaling": {
        "missing": unchanged,
        "null": of_config(rope_scaling=None),
        "empty": of_config(rope_scaling={}),
        "default": of_config(rope_scaling={"rope_type": "default"}),
        "yarn": of_config(rope_scaling={"rope_type": "yarn", **YARN}),
        "yarn by type": of_config(rope_scaling={"type": "yarn", **YARN}),
        "yarn with theta": of_config(rope_scaling={"rope_type": "yarn", **YARN, **THETA}),
        "yarn without factor": of_config(rope_scaling={"rope_type": "yarn", "original_max_position_embeddings": 64}),
        "linear": of_config(rope_scaling={"type": "linear", "factor": 2.0}),
        "llama3": of_config(rope_scaling=LLAMA3),
        "half a llama3": of_config(rope_scaling={"rope_type": "llama3", "factor": 4.0}),
        "both types": of_config(rope_scaling={"type": "linear", "rope_type": "yarn", **YARN}),
        "dynamic": of_config(rope_scaling={"type": "dynamic", "factor": 2.0}),
        "unknown": of_config(rope_scaling={"type": "spiral", "factor": 2.0}),
    },
    "rope_parameters": {
        "missing": drop(CONFIG, "rope_parameters"),
        "null": of_config(rope_parameters=None),
        "empty": of_config(rope_parameters={}),
        "plain": of_config(rope_parameters={"rope_type": "default", **THETA}),
        "plain, usual theta": of_config(rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
        "yarn": of_config(rope_parameters={"rope_type": "yarn", **YARN, **THETA}),
        "linear without theta": of_config(rope_parameters={"rope_type": "linear", "factor": 2.0}),
        "llama3": of_config(rope_parameters=LLAMA3 | THETA),
        "by layers": of_config(rope_parameters=NESTED),
    },
    "rope_theta": {"missing": unchanged, "500": of_config(**THETA), "20": of_config(rope_theta=20.0)},
    "original_max_position_embeddings": {
        "missing": unchanged,
        "32": of_config(original_max_position_embeddings=32),
    },
}
PHI3: Axes = {
    "rope_scaling": {
        "missing": unchanged,
        "longrope": of_config(rope_scaling=LONGROPE),
        "su": of_config(rope_scaling={"type": "su", **FACTORS}),
        "yarn": of_config(rope_scaling={"type": "yarn", **FACTORS}),
        "factor": of_config(rope_scaling=LONGROPE | {"factor": 2.0}),
        "attention_factor": of_config(rope_scaling=LONGROPE | {"attention_factor": 1.5}),
        "default": of_config(rope_scaling={"rope_type": "default"}),
    },
    "rope_parameters": {
        "missing": drop(CONFIG, "rope_parameters"),
        "longrope": of_config(rope_parameters=LONGROPE | THETA),
        "own original": of_config(rope_parameters=LONGROPE | THETA | {"original_max_position_embeddings": 32}),
        "plain": of_config(rope_parameters={"rope_type": "default", **THETA}),
    },
    "rope_theta": {"missing": unchanged, "500": of_config(**THETA)},
    "original_max_position_embeddings": {
        "missing": drop(CONFIG, "original_max_position_embeddings"),
        "64": unchanged,
        "32": of_config(original_max_position_embeddings=32),
    },
}
FULL = NESTED["full_attention"]
BY_LAYERS: Axes = {
    "rope_scaling": {
        "missing": unchanged,
        "empty": of_config(rope_scaling={}),
        "linear": of_config(rope_scaling={"rope_type": "linear", "factor": 4.0}),
        "linear by type": of_config(rope_scaling={"type": "linear", "factor": 4.0}),
        "yarn": of_config(rope_scaling={"rope_type": "yarn", **YARN}),
    },
    "rope_parameters": {
        "missing": drop(CONFIG, "rope_parameters"),
        "null": of_config(rope_parameters=None),
        "both": unchanged,
        "full alone": of_config(rope_parameters={"full_attention": FULL}),
        "without theta": of_config(rope_parameters={"full_attention": {"rope_type": "linear", "factor": 2.0}}),
        "null inside": of_config(rope_parameters={"full_attention": FULL, "sliding_attention": None}),
        "flat": of_config(rope_parameters={"rope_type": "default", **THETA}),
    },
    "rope_theta": {"missing": unchanged, "500": of_config(**THETA)},
    "rope_local_base_freq": {"missing": unchanged, "50": of_config(rope_local_base_freq=50.0)},
    "original_max_position_embeddings": {"missing": unchanged, "32": of_config(original_max_position_embeddings=32)},
    "layer_types": {
        "missing": drop(CONFIG, "layer_types"),
        "stated": put(CONFIG, "layer_types", ["full_attention", "sliding_attention"]),
    },
}
HALF = {"partial_rotary_factor": 0.5}
PARTIAL: Axes = {
    "rope_scaling": {
        "missing": unchanged,
        "linear": of_config(rope_scaling={"rope_type": "linear", "factor": 2.0}),
        "linear of a half": of_config(rope_scaling={"rope_type": "linear", "factor": 2.0, **HALF}),
        "yarn and theta": of_config(rope_scaling={"rope_type": "yarn", **YARN, **THETA, **HALF}),
    },
    "rope_parameters": {
        "missing": drop(CONFIG, "rope_parameters"),
        "of a half": unchanged,
        "of a quarter": of_config(rope_parameters={"rope_type": "default", **THETA, "partial_rotary_factor": 0.25}),
        "of what is beside": of_config(rope_parameters={"rope_type": "default", **THETA}),
    },
    "partial_rotary_factor": {
        "missing": unchanged,
        "0.25": of_config(partial_rotary_factor=0.25),
        "1.0": of_config(partial_rotary_factor=1.0),
    },
    "rope_theta": {"missing": unchanged, "500": of_config(**THETA)},
}
STRETCHED: Axes = {
    "rope_scaling": {
        "missing": unchanged,
        "null": of_config(rope_scaling=None),
        "default": of_config(rope_scaling={"rope_type": "default"}),
        "yarn": of_config(rope_scaling={"rope_type": "yarn", **YARN, "truncate": False}),
    },
    "rope_parameters": {
        "missing": drop(CONFIG, "rope_parameters"),
        "null": of_config(rope_parameters=None),
        "empty": of_config(rope_parameters={}),
        "stretched": unchanged,
        "plain": of_config(rope_parameters={"rope_type": "default", **THETA}),
    },
    "rope_theta": {"missing": unchanged, "500": of_config(**THETA)},
}
SHORT = 32
"""No longer than any original context."""


def rope_variants() -> Iterator[Variant]:
    """Yield variants with all pairs of statements about ropes, of longrope on both sides of the original context."""
    for seed, base in enumerate(("llama", "qwen3")):
        yield from from_rows(base, "ropes", FLAT, all_pairs(_labels(FLAT), seed))
    for variant in from_rows("phi3", "longrope", PHI3, all_pairs(_labels(PHI3), 2)):
        yield variant._replace(name=f"{variant.name}, short text", lengths=(9,), context=SHORT)
        yield variant._replace(name=f"{variant.name}, long text", lengths=(90,))
    yield Variant("phi3, longrope: a short text in a long context", "phi3", unchanged, lengths=(9,))
    yield from from_rows("gemma3_text", "ropes", BY_LAYERS, all_pairs(_labels(BY_LAYERS), 3))
    by_layers = {axis: labels for axis, labels in BY_LAYERS.items() if axis != "rope_local_base_freq"}
    yield from from_rows("olmo3", "ropes", by_layers, all_pairs(_labels(by_layers), 4))
    yield from from_rows("glm4", "ropes", PARTIAL, all_pairs(_labels(PARTIAL), 5))
    yield from from_rows("gpt_oss", "ropes", STRETCHED, all_pairs(_labels(STRETCHED), 6))


def _labels(axes: Axes) -> dict[str, list[str]]:
    return {axis: list(labels) for axis, labels in axes.items()}
