"""Statements about SentencePiece's tokens in a GGUF file."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from support.sentencepiece_gguf import MORE, SCORES, TOKENS, TYPES, sentencepiece_metadata

from .gguf_parts import ARCHITECTURE, GGUFParts
from .gguf_statements import Edit, GGUFVariant, each, ggml
from .pairs import all_pairs
from .variant import GGUF_TEXT

ARCHITECTURES = ("llama", "phi3", "gemma2")
"""Architectures that spell spaces in three ways."""


def _unchanged(_: GGUFParts) -> None:
    pass


def _base(architecture: str) -> Edit:
    """Return an edit of the base's tokens and architecture. The tensors, which no tokenizer reads, stay."""

    def edit(parts: GGUFParts) -> None:
        before = f"{parts.metadata[ARCHITECTURE]}."
        sizes = {key.removeprefix(before): value for key, value in parts.metadata.items() if key.startswith(before)}
        parts.metadata = sentencepiece_metadata(architecture)
        parts.metadata |= {f"{architecture}.{key}": value for key, value in sizes.items()}

    return edit


def _shuffled(parts: GGUFParts) -> None:
    """Give learnt tokens scores in another order than that of their ids."""
    learnt = parts.metadata[SCORES][259:]
    random.Random(1).shuffle(learnt)
    parts.metadata[SCORES] = [*parts.metadata[SCORES][:259], *learnt]


def _tied(parts: GGUFParts) -> None:
    parts.metadata[SCORES] = [0.0] * len(parts.metadata[SCORES])


def _types(kind: int) -> Edit:
    """Return an edit that gives the tokens behind the learnt ones one type."""

    def edit(parts: GGUFParts) -> None:
        first = parts.metadata[TOKENS].index(MORE[0])
        for i in range(first, first + len(MORE)):
            _element(TYPES, i, kind)(parts)

    return edit


def _element(name: str, index: int, value: Any) -> Edit:
    def edit(parts: GGUFParts) -> None:
        parts.metadata[name] = [*parts.metadata[name][:index], value, *parts.metadata[name][index + 1 :]]

    return edit


AXES: Mapping[str, Mapping[str, Edit]] = {
    "scores": {"falling": _unchanged, "shuffled": _shuffled, "tied": _tied},
    "merges": {"missing": _unchanged, "four": ggml("merges", ["h e", "▁ t", "▁t he", "l l"])},
    "types": {"mixed": _unchanged, "control": _types(3), "user-defined": _types(4), "normal": _types(1)},
    "add_bos_token": {
        "true": _unchanged,
        "missing": ggml("add_bos_token", None),
        "false": ggml("add_bos_token", False),
    },
    "add_eos_token": {"false": _unchanged, "true": ggml("add_eos_token", True)},
    "add_space_prefix": {"missing": _unchanged, "true": ggml("add_space_prefix", True)},
    "bos_token_id": {"1": _unchanged, "missing": ggml("bos_token_id", None), "300": ggml("bos_token_id", 300)},
    "eos_token_id": {
        "2": _unchanged,
        "<|user|>": ggml("eos_token_id", sentencepiece_metadata()[TOKENS].index("<|user|>")),
    },
    "unknown_token_id": {"0": _unchanged, "missing": ggml("unknown_token_id", None)},
    "padding_token_id": {"missing": _unchanged, "</s>": ggml("padding_token_id", 2)},
    "pre": {"default": _unchanged, "missing": ggml("pre", None)},
    "remove_extra_whitespaces": {"missing": _unchanged, "true": ggml("remove_extra_whitespaces", True)},
}
REFUSED: Mapping[str, tuple[Edit, str]] = {
    "no scores": (ggml("scores", None), "tokenizer.ggml.scores"),
    "fewer scores": (ggml("scores", [0.0] * 9), "but 9 scores"),
    "whole numbers for scores": (ggml("scores", [1, 2]), "tokenizer.ggml.scores"),
    "a score that is no number": (_element(SCORES, 300, float("nan")), "is not a number"),
    "no types": (ggml("token_type", None), "tokenizer.ggml.token_type"),
    "fewer types": (ggml("token_type", [1] * 9), "token types"),
    "a token twice": (_element(TOKENS, 300, "he"), "2 tokens are 'he'"),
    "a byte that no token is": (_element(TOKENS, 3 + 0x0A, "x1"), "<0x0A>"),
    "a token of 300 characters": (_element(TOKENS, 300, "x" * 300), "300 characters"),
    "a merge of an unknown token": (ggml("merges", ["h q"]), "merge 'h q'"),
    "a merge of one token": (ggml("merges", ["he"]), "merge 'he'"),
    "bos beyond the tokens": (ggml("bos_token_id", 9999), "bos_token_id 9999"),
    "a number for add_space_prefix": (ggml("add_space_prefix", 1), "add_space_prefix"),
}


def sentencepiece_variants() -> Iterator[GGUFVariant]:
    """Yield all pairs of statements, the prefixes of each architecture, and broken tables."""
    for seed, architecture in enumerate(ARCHITECTURES):
        for row in all_pairs({axis: list(labels) for axis, labels in AXES.items()}, seed):
            labels = ", ".join(f"{axis} {label}" for axis, label in row.items())
            edits = [AXES[axis][label] for axis, label in row.items()]
            yield _variant(architecture, labels, each(*edits))
    for architecture in ("llama", "gemma2"):
        yield _variant(architecture, "add_space_prefix false", ggml("add_space_prefix", False))
    for name, (edit, refusal) in REFUSED.items():
        yield _variant("llama", name, edit)._replace(refusal=refusal)


def _variant(architecture: str, name: str, edit: Edit) -> GGUFVariant:
    return GGUFVariant(f"{architecture}, SentencePiece: {name}", "llama", each(_base(architecture), edit), GGUF_TEXT)
