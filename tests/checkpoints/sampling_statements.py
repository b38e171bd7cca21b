"""Statements about sampling in generation_config.json and config.json."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .checkpoint import CONFIG, GENERATION, Change, Checkpoint, unchanged
from .pairs import all_pairs
from .variant import SAMPLING, Axes, Variant, from_rows


def _stated(**values: Any) -> Change:
    def change(checkpoint: Checkpoint) -> None:
        checkpoint.json[GENERATION] = values

    return change


def _beside(**values: Any) -> Change:
    def change(checkpoint: Checkpoint) -> None:
        checkpoint.config.update(values)

    return change


def _no_file(checkpoint: Checkpoint) -> None:
    del checkpoint.json[GENERATION]


def _cut(checkpoint: Checkpoint) -> None:
    checkpoint.json[GENERATION] = b'{"temperature": '


AXES: Axes = {
    GENERATION: {
        "has no sampling": unchanged,
        "is missing": _no_file,
        "is empty": _stated(),
        "has all": _stated(temperature=0.7, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1, do_sample=True),
        "has nulls": _stated(temperature=None, top_k=None),
        "takes all tokens": _stated(top_k=0, top_p=1.0, do_sample=True),
        "is greedy": _stated(do_sample=False),
        "is cut": _cut,
    },
    CONFIG: {
        "has none": unchanged,
        "has some": _beside(temperature=0.3, top_k=7),
        "has a null": _beside(temperature=None, top_p=0.8),
        "has them inside": _beside(text_config={"top_k": 9}),
    },
}


def sampling_variants() -> Iterator[Variant]:
    """Yield all pairs of statements about sampling."""
    rows = all_pairs({axis: list(labels) for axis, labels in AXES.items()}, 21)
    yield from from_rows("llama", "sampling", AXES, rows, SAMPLING)
