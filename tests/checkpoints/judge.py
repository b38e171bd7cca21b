"""Compares pdserve with transformers on one variant."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import torch

from .answers import (
    GGUF_TEXTS,
    REFUSALS,
    ReferenceFailed,
    Texts,
    Tokens,
    load_reference,
    our_sampling,
    our_texts,
    our_tokens,
    reference_logits,
    their_gguf_texts,
    their_sampling,
    their_texts,
)
from .bases import make_base
from .checkpoint import unchanged
from .exemptions import find_exemption, is_on_purpose
from .gguf_parts import make_parts
from .gguf_statements import GGUFVariant
from .variant import GGUF_TEXT, MODEL, SAMPLING, TEXT, Variant

ATOL = 1e-3
REFERENCE = "reference"
"""Folder of the checkpoint that transformers reads, within that of a variant that it can't read."""
NAMED = re.compile(r"[\w.-]+\.(?:json|safetensors|gguf)\b|[a-z]+(?:_[a-z]+)+|'[\w.-]+'")
"""A file, a key or a tensor in the message of a refusal."""


class Verdict(StrEnum):
    """What became of a variant."""

    EQUAL = "equal"
    REFUSED = "refused by name"
    EXEMPT = "exempt"
    FAILED = "failed"


class Outcome(NamedTuple):
    """``why``: the message of a refusal, the reason of an exemption, or what differs."""

    variant: Variant
    verdict: Verdict
    why: str = ""


def judge(variant: Variant, folder: Path, bases: Path) -> Outcome:
    """Write the variant into ``folder`` and compare. ``bases``: a folder for the unchanged checkpoints."""
    for change, place in ((variant.change, folder), (variant.reference, folder / REFERENCE)):
        if change is not None:
            checkpoint = make_base(variant.base, bases / variant.base).copy()
            change(checkpoint)
            checkpoint.write(place)
    try:
        difference = COMPARE[variant.side](variant, folder)
    except REFUSALS as e:
        return _refused(variant, str(e), folder)
    except Exception as e:  # noqa: BLE001 - an error without a sentence is a finding
        difference = f"pdserve fails: {e.__class__.__name__}: {e}"
    return verdict(variant, difference)


def verdict(variant: Variant, difference: str) -> Outcome:
    """Return the outcome of a variant that pdserve serves, with this difference from transformers, or with none."""
    reason = find_exemption(variant.name, difference) if difference else None
    if reason is not None:
        return Outcome(variant, Verdict.EXEMPT, reason)
    if difference:
        return Outcome(variant, Verdict.FAILED, difference)
    if variant.refusal is not None:
        return Outcome(variant, Verdict.FAILED, f"served, and the refusal must name {variant.refusal!r}")
    return Outcome(variant, Verdict.EQUAL)


def _named(variant: Variant, message: str) -> Outcome:
    """Return the outcome of a refusal. Its message must name what is wrong in one line."""
    if not NAMED.search(message) or (variant.refusal or "") not in message or "\n" in message:
        return Outcome(variant, Verdict.FAILED, f"the refusal does not name {variant.refusal!r}: {message}")
    return Outcome(variant, Verdict.REFUSED, message)


def _refused(variant: Variant, message: str, folder: Path) -> Outcome:
    """Return the outcome of a refusal; what transformers serves may only be refused on purpose."""
    if variant.refusal is None and not is_on_purpose(message):
        try:
            REFERENCES[variant.side](_reference(variant, folder))
        except ReferenceFailed:
            return _named(variant, message)
        return Outcome(variant, Verdict.FAILED, f"transformers serves it: {message}")
    return _named(variant, message)


def _reference(variant: Variant, folder: Path) -> Path:
    """Return the folder of the checkpoint that transformers reads."""
    return folder if variant.reference is None else folder / REFERENCE


def _compare_tokens(variant: Variant, folder: Path) -> str:
    ours = our_tokens(folder, variant.lengths, variant.context)
    if variant.refusal is not None:
        return ""
    try:
        model = load_reference(_reference(variant, folder))
        return difference_of_tokens(model, variant, ours) or _compare_texts(variant, folder)
    except ReferenceFailed as e:
        return f"transformers fails: {e}"


def difference_of_tokens(model: torch.nn.Module, variant: Variant, ours: Tokens) -> str:
    """Return how ``ours`` differs from what ``model`` chooses, or "". Raises ``ReferenceFailed``."""
    theirs = reference_logits(model, variant.lengths, ours.tokens)
    for length, tokens, mine, other in zip(variant.lengths, ours.tokens, ours.logits, theirs, strict=True):
        if other.argmax(-1).tolist() != tokens:
            return f"prompt of {length}: tokens {tokens}, and transformers' are {other.argmax(-1).tolist()}"
        if mine.shape != other.shape or not torch.allclose(mine, other, atol=ATOL, rtol=ATOL):
            return f"prompt of {length}: the same tokens by other logits"
    return ""


def _compare_texts(variant: Variant, folder: Path) -> str:
    ours = our_texts(folder)
    if variant.refusal is not None:
        return ""
    try:
        return difference_of_texts(ours, their_texts(folder))
    except ReferenceFailed as e:
        return f"transformers fails: {e}"


def _compare_sampling(_: Variant, folder: Path) -> str:
    ours = our_sampling(folder)
    try:
        theirs = their_sampling(folder)
    except ReferenceFailed as e:
        return f"transformers fails: {e}"
    return "" if ours == theirs else f"sampling {ours}, and transformers' is {theirs}"


COMPARE = {MODEL: _compare_tokens, TEXT: _compare_texts, SAMPLING: _compare_sampling}
REFERENCES: dict[str, Callable[[Path], object]] = {
    MODEL: load_reference,
    TEXT: their_texts,
    SAMPLING: their_sampling,
}


def difference_of_texts(ours: Texts, theirs: Texts) -> str:
    """Return the first part that differs, or ""."""
    for part, mine, other in zip(Texts._fields, ours, theirs, strict=True):
        if mine != other:
            return f"{part} {mine}, and transformers' are {other}"
    return ""


def _difference_of_gguf_texts(path: Path, *, served: bool) -> str:
    """Compare with transformers' tokenizer of the same file. ``served``: the file does not have to be refused."""
    ours = our_texts(path, GGUF_TEXTS)
    try:
        return difference_of_texts(ours, their_gguf_texts(path)) if served else ""
    except ReferenceFailed as e:
        return f"transformers fails: {e}"


def judge_gguf(variant: GGUFVariant, folder: Path, bases: Path) -> Outcome:
    """Write the GGUF into ``folder`` and compare pdserve with transformers."""
    path = folder / "m.gguf"
    folder.mkdir(parents=True, exist_ok=True)
    parts = make_parts(variant.base).copy()
    variant.edit(parts)
    parts.write(path)
    as_model = Variant(variant.name, variant.base, unchanged, variant.side, variant.lengths, None, variant.refusal)
    try:
        if variant.side == MODEL:
            ours = our_tokens(path, variant.lengths, None)
            difference = difference_of_tokens(variant.reference(variant.base), as_model, ours)
        elif variant.side == GGUF_TEXT:
            difference = _difference_of_gguf_texts(path, served=variant.refusal is None)
        else:
            make_base(variant.base, bases / variant.base).write(folder / "base")
            difference = difference_of_texts(our_texts(path), variant.texts(their_texts(folder / "base")))
    except REFUSALS as e:
        if variant.refusal is None:
            return Outcome(as_model, Verdict.FAILED, f"refused, and the file must be served: {e}")
        return _named(as_model, str(e))
    except Exception as e:  # noqa: BLE001 - as above
        difference = f"pdserve fails: {e.__class__.__name__}: {e}"
    return verdict(as_model, difference)
