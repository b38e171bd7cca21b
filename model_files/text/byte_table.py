"""The bytes that each token stands for.

The tokenizers of today's models are of two kinds. In byte-level ones, each character of a token encodes one byte.
SentencePiece with byte fallback has "▁" for a space and "<0x0A>" for a byte. For both, the text of a token does not
depend on its neighbours, except for one space at the very start. So a table of bytes replaces the tokenizer's decoder.
Other decoders have none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from .utf8_stream import PER_BYTE, PER_SEQUENCE

SENTENCEPIECE_SPACE = "▁"
BYTE_TOKEN = re.compile(r"<0x(\+[0-9A-Fa-f]|[0-9A-Fa-f]{2})>")
"""A token that stands for a byte. The ``tokenizers`` library reads a sign, too."""


class ByteTable(NamedTuple):
    """``pieces[token_id]`` are the token's bytes, empty for ids without a token.

    ``strip_first_space``: a text that starts with a space is shown without it, as SentencePiece models add one.
    """

    pieces: list[bytes]
    special_ids: frozenset[int]
    strip_first_space: bool
    errors: str = PER_SEQUENCE
    """How bytes that are no UTF-8 are shown: see ``utf8_stream.py``."""


def byte_level_alphabet() -> dict[int, str]:
    """Return GPT-2's character for each byte: itself for a printable byte, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in printable}
    hidden = [byte for byte in range(0x100) if byte not in alphabet]
    return alphabet | {byte: chr(0x100 + i) for i, byte in enumerate(hidden)}


BYTE_OF = {character: byte for byte, character in byte_level_alphabet().items()}


def byte_level_table(tokens: Sequence[str | None], special_ids: frozenset[int]) -> ByteTable:
    """Make the table of a byte-level tokenizer.

    ``tokens``: each token by its id, None for an id without one. ``special_ids``: tokens that a decoder may skip.
    """
    pieces = [byte_level_bytes(token or "") for token in tokens]
    return ByteTable(pieces, special_ids, strip_first_space=False, errors=PER_SEQUENCE)


def byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level token; those of its text if a character is outside the alphabet."""
    try:
        return bytes([BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def byte_fallback_table(
    tokens: Sequence[str | None], special_ids: frozenset[int], *, strip_first_space: bool
) -> ByteTable:
    """Make the table of a SentencePiece tokenizer with byte fallback.

    ``tokens``: each token by its id, or None. ``special_ids``: tokens that a decoder may skip. ``strip_first_space``:
    whether a text is decoded without its first space, because the model adds one.
    """
    pieces = [_sentencepiece_bytes(token or "") for token in tokens]
    return ByteTable(pieces, special_ids, strip_first_space, errors=PER_BYTE)


def _sentencepiece_bytes(token: str) -> bytes:
    byte = byte_of_token(token)
    return token.replace(SENTENCEPIECE_SPACE, " ").encode() if byte is None else byte


def byte_of_token(token: str) -> bytes | None:
    """Return the byte that a token like "<0x0A>" stands for; None for a text, like "<0xyz>"."""
    match = BYTE_TOKEN.fullmatch(token)
    return None if match is None else bytes([int(match[1], 16)])


def table_for_decoder(decoder: Any, tokens: Sequence[str | None], special_ids: frozenset[int]) -> ByteTable | None:
    """Make the table for a tokenizer.json's ``decoder`` section; None if a token's text depends on its neighbours."""
    steps = flatten_decoder(decoder)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return byte_level_table(tokens, special_ids)
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"]:
        return None
    if steps[0].get("pattern") != {"String": SENTENCEPIECE_SPACE} or steps[0].get("content") != " ":
        return None
    if len(steps) == 3:
        return byte_fallback_table(tokens, special_ids, strip_first_space=False)
    if steps[3:] == [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]:
        return byte_fallback_table(tokens, special_ids, strip_first_space=True)
    return None


def flatten_decoder(decoder: Any) -> list[dict[str, Any]]:
    """Return the steps of a ``decoder`` section, those of nested sequences included."""
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") == "Sequence":
        return [step for part in decoder.get("decoders", []) for step in flatten_decoder(part)]
    return [decoder]
