"""Statements about special tokens in the JSON files of a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from .bases import make_tokenizer
from .checkpoint import (
    CONFIG,
    GENERATION,
    MAP,
    TOKENIZER,
    TOKENIZER_CONFIG,
    Change,
    Checkpoint,
    both,
    drop,
    put,
    unchanged,
)
from .pairs import all_pairs
from .variant import TEXT, Axes, Variant, from_rows

END, PAD = "</s>", "<pad>"
ADDED = "added_tokens_decoder"


def _file(name: str, content: Any) -> Change:
    def change(checkpoint: Checkpoint) -> None:
        checkpoint.json[name] = content

    return change


def _no_file(name: str) -> Change:
    def change(checkpoint: Checkpoint) -> None:
        checkpoint.json.pop(name, None)

    return change


def _flags(**flags: bool) -> Change:
    """Return a change of the properties of </s> in tokenizer.json."""

    def change(checkpoint: Checkpoint) -> None:
        for token in checkpoint.json[TOKENIZER]["added_tokens"]:
            if token["content"] == END:
                token.update(flags)

    return change


def _entry(content: str, **flags: bool) -> dict[str, Any]:
    plain = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    return {"content": content, **plain, **flags}


AGREED = {"264": _entry("<s>"), "265": _entry(END), "266": _entry(PAD)}


def _added(**changed: dict[str, Any]) -> Change:
    entries = AGREED | {token_id.removeprefix("at"): entry for token_id, entry in changed.items()}
    return put(TOKENIZER_CONFIG, ADDED, entries)


SPECIALS: Axes = {
    "tokenizer.json": {
        "special": unchanged,
        "not added": _file(TOKENIZER, json.loads(make_tokenizer(special=False).to_str())),
        "not special": _flags(special=False),
        "strips": _flags(rstrip=True),
    },
    "eos_token": {
        "text": unchanged,
        "missing": drop(TOKENIZER_CONFIG, "eos_token"),
        "pad": put(TOKENIZER_CONFIG, "eos_token", PAD),
        "object": put(TOKENIZER_CONFIG, "eos_token", {"__type": "AddedToken", **_entry(END)}),
        "new": put(TOKENIZER_CONFIG, "eos_token", "<end>"),
        "null": put(TOKENIZER_CONFIG, "eos_token", None),
    },
    ADDED: {
        "missing": unchanged,
        "agreed": _added(),
        "none": put(TOKENIZER_CONFIG, ADDED, {}),
        "strips": _added(at265=_entry(END, lstrip=True)),
        "not special": _added(at265=_entry(END, special=False)),
        "one more": _added(at267=_entry("<think>", special=False)),
        "two more": _added(at267=_entry("<think>"), at268=_entry("<tool>", special=False)),
        "another id": _added(at275=_entry("<think>")),
    },
    MAP: {
        "agreed": unchanged,
        "missing": _no_file(MAP),
        "eos is pad": put(MAP, "eos_token", PAD),
        "eos strips": put(MAP, "eos_token", _entry(END, lstrip=True)),
        "other bos": put(MAP, "bos_token", PAD),
        "additional": put(MAP, "additional_special_tokens", ["he"]),
        "extra": put(MAP, "extra_special_tokens", ["he", "ab"]),
    },
    "extra": {
        "none": unchanged,
        "additional": put(TOKENIZER_CONFIG, "additional_special_tokens", ["hell", "<new>"]),
        "extra": put(TOKENIZER_CONFIG, "extra_special_tokens", ["hell"]),
        "objects": put(
            TOKENIZER_CONFIG, "extra_special_tokens", [{"__type": "AddedToken", **_entry("ab", rstrip=True)}]
        ),
        "named": put(TOKENIZER_CONFIG, "extra_special_tokens", {"image_token": "<image>"}),
        "own name": put(TOKENIZER_CONFIG, "image_token", "ab"),
    },
    "split_special_tokens": {"missing": unchanged, "true": put(TOKENIZER_CONFIG, "split_special_tokens", True)},
    "add_bos_token": {
        "missing": unchanged,
        "false": put(TOKENIZER_CONFIG, "add_bos_token", False),
        "true": put(TOKENIZER_CONFIG, "add_eos_token", True),
    },
    "post_processor": {"bos": unchanged, "none": put(TOKENIZER, "post_processor", None)},
    "added_tokens.json": {"missing": unchanged, "one": _file("added_tokens.json", {"<extra>": 267})},
}
ENDS: Axes = {
    CONFIG: {
        "</s>": unchanged,
        "missing": drop(CONFIG, "eos_token_id"),
        "<pad>": put(CONFIG, "eos_token_id", 266),
        "list": put(CONFIG, "eos_token_id", [265, 20]),
        "-1": put(CONFIG, "eos_token_id", -1),
        "null": put(CONFIG, "eos_token_id", None),
    },
    GENERATION: {
        "</s>": unchanged,
        "no file": _no_file(GENERATION),
        "missing": drop(GENERATION, "eos_token_id"),
        "list": put(GENERATION, "eos_token_id", [266, 265]),
        "null": put(GENERATION, "eos_token_id", None),
    },
    "eos_token": {
        "</s>": unchanged,
        "missing": drop(TOKENIZER_CONFIG, "eos_token"),
        "<pad>": put(TOKENIZER_CONFIG, "eos_token", PAD),
    },
    MAP: {"missing": _no_file(MAP), "</s>": unchanged, "<s>": put(MAP, "eos_token", "<s>")},
}
WRONG: dict[str, tuple[Change, str]] = {
    "eos_token_id is a text": (put(CONFIG, "eos_token_id", "2"), "eos_token_id '2'"),
    "eos_token_id is a list of texts": (put(GENERATION, "eos_token_id", [265, "2"]), GENERATION),
    "bos_token is a number": (both(put(TOKENIZER_CONFIG, "bos_token", 5), _no_file(MAP)), "bos_token 5"),
    "added_tokens_decoder is a list": (put(TOKENIZER_CONFIG, ADDED, ["<s>"]), ADDED),
    "added_tokens_decoder without a text": (put(TOKENIZER_CONFIG, ADDED, {"265": {"special": True}}), ADDED),
    "extra_special_tokens is a text": (put(TOKENIZER_CONFIG, "extra_special_tokens", "<x>"), "extra_special_tokens"),
    "tokenizer_config.json is cut": (_file(TOKENIZER_CONFIG, b'{"bos_token": '), TOKENIZER_CONFIG),
    "tokenizer_config.json is a list": (_file(TOKENIZER_CONFIG, []), TOKENIZER_CONFIG),
    "special_tokens_map.json is cut": (_file(MAP, b"{"), MAP),
    "special_tokens_map.json is a list": (_file(MAP, []), MAP),
    "generation_config.json is cut": (_file(GENERATION, b"{"), GENERATION),
    "tokenizer.json is cut": (_file(TOKENIZER, b'{"version": "1.0"'), TOKENIZER),
    "tokenizer.json is a list": (_file(TOKENIZER, []), TOKENIZER),
    "tokenizer.json without a model": (drop(TOKENIZER, "model"), TOKENIZER),
    "added_tokens.json has texts": (_file("added_tokens.json", {"<extra>": "267"}), "added_tokens.json"),
}
"""Changes by name, and what the refusal must contain."""


def token_variants() -> Iterator[Variant]:
    """Yield all pairs of statements about special tokens, and about tokens that end a text."""
    yield from from_rows("llama", "special tokens", SPECIALS, _pairs(SPECIALS, 11), TEXT)
    yield from from_rows("llama", "ends", ENDS, _pairs(ENDS, 12), TEXT)
    for name, (change, refusal) in WRONG.items():
        yield Variant(f"llama, wrong: {name}", "llama", change, TEXT, refusal=refusal)


def _pairs(axes: Axes, seed: int) -> list[dict[str, str]]:
    return all_pairs({axis: list(labels) for axis, labels in axes.items()}, seed)
