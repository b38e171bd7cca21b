"""Work on large bodies without holding up the event loop: on a thread (``Aside``), and in pieces.

A large body is parsed field by field, and a list of lists entry by entry. The event loop can run between two pieces. A
piece is at most one prompt.
"""

from __future__ import annotations

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


def parse_in_pieces(data: bytes) -> Any:
    """Parse ``data`` as ``orjson.loads`` does, but field by field, so that the event loop can run in between.

    A body of more than ``MAX_PIECES`` lists and objects is parsed at once, which is faster. Raises
    ``orjson.JSONDecodeError``.
    """
    if data.count(b"[") + data.count(b"{") > MAX_PIECES:
        return orjson.loads(data)
    try:
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        return {name: _parse_value(memoryview(raw)) for name, raw in fields.items()}
    except (msgspec.MsgspecError, orjson.JSONDecodeError, RecursionError):
        return orjson.loads(data)  # not an object, or not valid: this parser explains the error


def _parse_value(raw: memoryview) -> Any:
    beginning = bytes(raw[:64]).split()
    if len(raw) > PIECE_BYTES and b"".join(beginning)[:2] in (b"[[", b"[{"):
        return [orjson.loads(memoryview(entry)) for entry in msgspec.json.decode(raw, type=list[msgspec.Raw])]
    return orjson.loads(raw)


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
