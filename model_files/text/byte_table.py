"""The bytes that each token stands for.

The tokenizers of today's models are of two kinds. In byte-level ones, each character of a token encodes one byte.
SentencePiece with byte fallback has "▁" for a space and "<0x0A>" for a byte. For both, the text of a token does not
depend on its neighbours, except for one space at the very start. So a table of bytes replaces the tokenizer's decoder.
Other decoders have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

SENTENCEPIECE_SPACE = "▁"


class ByteTable(NamedTuple):
    """``pieces[token_id]`` are the token's bytes, empty for ids without a token.

    ``strip_first_space``: a text that starts with a space is shown without it, as SentencePiece models add one.
    """

    pieces: list[bytes]
    special_ids: frozenset[int]
    strip_first_space: bool


def byte_level_alphabet() -> dict[int, str]:
    """Return GPT-2's character for each byte: printable bytes stand for themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in printable}
    hidden = [byte for byte in range(0x100) if byte not in alphabet]
    return alphabet | {byte: chr(0x100 + i) for i, byte in enumerate(hidden)}


def byte_level_table(tokens: Sequence[str | None], special_ids: frozenset[int]) -> ByteTable:
    """Make the table of a byte-level tokenizer. A token with a character outside the alphabet stands for its text."""
    byte_of = {character: byte for byte, character in byte_level_alphabet().items()}
    pieces = []
    for token in tokens:
        try:
            pieces.append(bytes([byte_of[character] for character in token or ""]))
        except KeyError:
            pieces.append((token or "").encode())
    return ByteTable(pieces, special_ids, strip_first_space=False)


def byte_fallback_table(
    tokens: Sequence[str | None], special_ids: frozenset[int], *, strip_first_space: bool
) -> ByteTable:
    """Make the table of a SentencePiece tokenizer with byte fallback."""
    pieces = [_sentencepiece_bytes(token or "") for token in tokens]
    return ByteTable(pieces, special_ids, strip_first_space)


def _sentencepiece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass  # a token like "<0xyz>" is text
    return token.replace(SENTENCEPIECE_SPACE, " ").encode()


def table_for_decoder(decoder: Any, tokens: Sequence[str | None], special_ids: frozenset[int]) -> ByteTable | None:
    """Make the table for a tokenizer.json's ``decoder`` section; None if a token's text depends on its neighbours."""
    steps = _flatten(decoder)
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


def _flatten(decoder: Any) -> list[dict[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") == "Sequence":
        return [step for part in decoder.get("decoders", []) for step in _flatten(part)]
    return [decoder]
