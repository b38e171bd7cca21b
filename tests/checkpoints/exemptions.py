"""Differences from transformers that stay, and refusals of what transformers serves, each with its reason."""

from __future__ import annotations

import re
from typing import NamedTuple


class Exemption(NamedTuple):
    """``variants`` and ``differences``: patterns that names and differences must contain."""

    variants: str
    differences: str
    reason: str


EXEMPTIONS = (
    Exemption(
        "longrope: a short text in a long context",
        "tokens|logits",
        "cached keys can't change as their text grows; docs/models.md and the log say so",
    ),
    Exemption(
        "mistral, windows: sliding_window null, layer_types (full|null)",
        "transformers fails: ValueError",
        "transformers' Ministral needs the window that none of its layers has",
    ),
    Exemption(
        "rope_scaling su, ",
        "transformers fails: KeyError.*original_max_position_embeddings",
        "transformers renames Phi-3's su only after it has asked for the original context; the first files have su",
    ),
    Exemption(
        "(gemma3_text|olmo3), ropes: rope_scaling linear by type, rope_parameters (missing|null)",
        "tokens",
        "transformers' own default rope_type hides the older key type, and with it what the file asks for",
    ),
    Exemption(
        "an index without metadata", "transformers fails: KeyError: 'metadata'", "nothing needs an index's metadata"
    ),
    Exemption(
        "llama, SentencePiece: add_space_prefix false",
        "^ids",
        "transformers does not read the key; llama.cpp does, and the converter states it for models without a prefix",
    ),
    Exemption(
        "added_tokens_decoder another id",
        "^ids",
        "transformers gives a token another id than the file does; here it is left out, as its embedding has that id",
    ),
)


ON_PURPOSE: dict[str, str] = {
    "but the config ties the two": "transformers unties them with a warning; the config is wrong either way",
    "but lacks its (rope_theta|partial_rotary_factor)": "transformers takes a value that the weights are not for",
    "rotary scaling 'dynamic' is not supported": "cached keys would have to change as their text grows",
    "rope_parameters (apart for|for all)": "transformers ignores ropes that its class has no use for",
    "layer_types has sliding_attention": "transformers fails at the first text",
    r"layer_types \[.*\] is not supported": "transformers gives all layers of this family the window",
    "which its config does not account for": "transformers leaves weights out",
}
"""Patterns of messages that refuse what transformers serves, and why."""


def is_on_purpose(message: str) -> bool:
    """Return whether a checkpoint may be refused with ``message`` although transformers serves it."""
    return any(re.search(pattern, message) for pattern in ON_PURPOSE)


def find_exemption(name: str, difference: str) -> str | None:
    """Return the reason for which the variant may differ, or None."""
    for exemption in EXEMPTIONS:
        if re.search(exemption.variants, name) and re.search(exemption.differences, difference):
            return exemption.reason
    return None
