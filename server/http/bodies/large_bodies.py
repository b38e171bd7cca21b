"""Work on large bodies without holding up the event loop: on a thread (``Aside``), and in pieces.

A large body is parsed field by field, and a list of lists entry by entry. The event loop can run between two pieces. A
piece is at most one prompt.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
import orjson

from ..errors import ApiError

LARGE_BYTES = 1 << 16
"""A body of this length takes some 0.2 ms to parse, but up to 10 ms to check, with thousands of objects in it."""
LARGE_BATCH = 256
"""A batch of more prompts than this is large: each takes some 10 µs to plan."""
PIECE_BYTES = 1 << 18
"""Lists longer than this are parsed entry by entry."""
MAX_PIECES = 1 << 14
"""Maximum number of lists and objects in a body that is parsed in pieces. More take longer in pieces than at once."""
MAX_TOKEN_IDS = 1 << 20
"""Maximum number of token ids in one body: checking them takes some 60 ms, in one piece."""
ID_FIELDS = ("input_ids", "prompt", "tokens", "input", "items", "query")
"""Fields that may hold token ids, in the bodies of any path."""
MAX_TEXT_PARTS = 1 << 14
"""Maximum number of text parts in all messages of one body."""
MAX_TEXT_BYTES = 33 << 20
"""Maximum memory for the strings of one body: that of the longest body in ASCII.

Python stores every character of a text in 4 bytes if one is beyond U+FFFF. A body of 32 MiB with one emoji would take
128 MiB.
"""
CONTINUATION = bytes(range(0x80, 0xC0))
BELOW_4_BYTES = bytes(range(0xF0))
LATIN_1 = bytes(range(0xC4))
"""Bytes of UTF-8: those inside characters, those of characters below U+10000, and of characters below U+0100."""
ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89abAB]")
"""An escaped half of a character beyond U+FFFF, the first one."""
ESCAPE_BYTES = 6
"""Length of a numbered escape such as ``\\u6f22``."""


def parse_in_pieces(data: bytes) -> Any:
    """Parse ``data`` as ``orjson.loads`` does, but field by field, so that the event loop can run in between.

    A body of more than ``MAX_PIECES`` lists and objects is parsed at once, which is faster, if that surely takes little
    memory. Raises ``orjson.JSONDecodeError``, and ``ApiError`` 413 if its strings would take more than
    ``MAX_TEXT_BYTES``.
    """
    parser = _PieceParser(len(data))
    if data.count(b"[") + data.count(b"{") > MAX_PIECES and parser.is_small(data):
        return orjson.loads(data)
    try:
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        return {name: parser.parse_value(memoryview(raw)) for name, raw in fields.items()}
    except (msgspec.ValidationError, RecursionError):
        return _PieceParser(len(data)).parse(data)  # no object, or one that is nested deeply
    except (msgspec.DecodeError, orjson.JSONDecodeError, UnicodeDecodeError):
        return orjson.loads(data)  # not valid: this parser explains the error


class _PieceParser:
    """Parses the pieces of one body, and limits the memory that their strings take."""

    def __init__(self, size: int) -> None:
        self._is_counting = size * 4 > MAX_TEXT_BYTES
        self._left = MAX_TEXT_BYTES

    def is_small(self, data: bytes) -> bool:
        """Return whether the strings of ``data`` surely take no more than ``MAX_TEXT_BYTES``, however wide they are."""
        return not self._is_counting or _text_bytes(data) <= MAX_TEXT_BYTES

    def parse_value(self, raw: memoryview) -> Any:
        beginning = bytes(raw[:64]).split()
        if len(raw) > PIECE_BYTES and b"".join(beginning)[:2] in (b"[[", b"[{", b'["'):
            return [self.parse(memoryview(entry)) for entry in msgspec.json.decode(raw, type=list[msgspec.Raw])]
        return self.parse(raw)

    def parse(self, piece: bytes | memoryview) -> Any:
        if self._is_counting:
            self._left -= _text_bytes(bytes(piece))
            if self._left < 0:
                limit = f"the body's texts would take more than {MAX_TEXT_BYTES >> 20} MiB in memory"
                why = "each character of a text takes as many bytes as the widest one"
                raise ApiError(413, f"{limit}, because {why}; shorten the texts, or split the batch")
        return orjson.loads(piece)


def _text_bytes(piece: bytes) -> int:
    """Return how many bytes the strings of a piece of JSON take at most, if its widest character is in all of them."""
    is_ascii = piece.isascii()
    escaped = piece.replace(b"\\\\", b"") if b"\\u" in piece else b""  # what follows a backslash is no number
    escapes = escaped.count(b"\\u")
    characters = len(piece) if is_ascii else len(piece.translate(None, CONTINUATION))
    characters -= (ESCAPE_BYTES - 1) * escapes
    if ESCAPED_SURROGATE.search(escaped) or (not is_ascii and piece.translate(None, BELOW_4_BYTES)):
        return 4 * characters
    if escapes or (not is_ascii and piece.translate(None, LATIN_1)):
        return 2 * characters
    return characters


def check_amount(content: dict[str, Any]) -> None:
    """Raise ``ApiError`` 413 if a parsed body has too many token ids or message parts to be checked in a short time.

    The limits are ``MAX_TOKEN_IDS`` and ``MAX_TEXT_PARTS``.
    """
    for name in ID_FIELDS:
        value = content.get(name)
        if isinstance(value, list) and value:
            # A batch may have texts beside lists of ids.
            is_one = isinstance(value[0], int)
            ids = len(value) if is_one else sum(len(entry) for entry in value if isinstance(entry, list))
            if ids > MAX_TOKEN_IDS:
                text = (
                    f"{name}: {ids} token ids in one body, the limit is {MAX_TOKEN_IDS}; send fewer prompts at a time"
                )
                raise ApiError(413, text, param=name)
    for name in ("messages", "input"):
        messages = content.get(name)
        if isinstance(messages, list):
            parts = sum(_parts(message) for message in messages if isinstance(message, dict))
            if parts > MAX_TEXT_PARTS:
                text = f"{name}: {parts} parts in all, the limit is {MAX_TEXT_PARTS}; join their texts"
                raise ApiError(413, text, param=name)


def _parts(message: dict[str, Any]) -> int:
    """Return the number of parts in the lists of a message, such as its content, and in the content of these parts."""
    parts = [part for value in message.values() if isinstance(value, list) for part in value]
    inner = (part.get("content") for part in parts if isinstance(part, dict))
    return len(parts) + sum(len(one) for one in inner if isinstance(one, list))
