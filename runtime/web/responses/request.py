"""Reads what a request for a response says about kept ones, and puts the conversation so far into its input."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from .response_store import KeptResponse, output_of

ABSENT, NULL, FALSE = msgspec.Raw(b""), msgspec.Raw(b"null"), msgspec.Raw(b"false")
REFERENCE = b'"item_reference"'
ITEM_ID = re.compile(r"[a-z]{1,8}_(.*)_([0-9]{1,6})")
"""Id of an item: its kind, the id of its response without the prefix, and its place in the output."""
RESPONSE_PREFIX = "resp_"
KEPT_ELSEWHERE = b'"kept_elsewhere":true}'
Find = Callable[[str], KeptResponse | None]
"""Finds a kept response of the client by its id."""


class NotKept(Exception):
    """The request names a response or an item that is not kept. ``param``: the field that names it."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class _KeptFields(msgspec.Struct):
    """The fields of a body that are about kept responses. Values stay JSON."""

    input: msgspec.Raw = ABSENT
    previous_response_id: msgspec.Raw = ABSENT
    store: msgspec.Raw = ABSENT
    kept_elsewhere: msgspec.Raw = ABSENT
    bootstrap_room: msgspec.Raw = ABSENT


class _Item(msgspec.Struct):
    """What an item reference has."""

    type: msgspec.Raw = ABSENT
    id: str = ""


class ResponseRequest(NamedTuple):
    """A request for a response."""

    body: bytes
    """The body that is passed on. Its input begins with the conversation so far."""
    keeps: bool
    """Whether the response is to be kept."""
    items: Sequence[bytes]
    """Items of the conversation before the response, JSON without the brackets of a list, in pieces."""


def read_request(raw: bytes, find: Find, *, keeps: bool, is_first: bool) -> ResponseRequest:
    """Read a request's body.

    A body that is not valid is passed on as it is: the API's own reader refuses it. ``find``: finds kept responses.
    ``keeps``: whether this server keeps responses at all. ``is_first``: whether instances stand behind this server,
    which are told to keep nothing. Raises ``NotKept``.
    """
    try:
        fields = msgspec.json.decode(raw, type=_KeptFields)
        previous = _text(fields.previous_response_id)
        new = _items(fields.input)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ResponseRequest(raw, False, ())
    is_leg = fields.bootstrap_room not in (ABSENT, NULL)
    if not is_first and (is_leg or fields.kept_elsewhere not in (ABSENT, NULL, FALSE)):
        # A router keeps it, or knows nothing of it, and no other instance of the pair does.
        return ResponseRequest(raw, False, ())
    earlier: list[bytes] = []
    if previous:
        kept = find(previous)
        if kept is None:
            raise NotKept("previous_response_id", f"{previous[:128]!r} is not kept here{_why(keeps)}")
        earlier = [kept.items, *(bytes(item) for item in output_of(kept.response))]
    if REFERENCE in raw:
        new = [_resolved(item, i, find, keeps) for i, item in enumerate(new)]
    items = [piece for piece in (*earlier, *new) if piece]
    wants = fields.store != FALSE and keeps
    changed = bool(earlier) or REFERENCE in raw
    body = raw
    if changed or (is_first and fields.store != FALSE):
        # Of fields with one name, the last one counts.
        own = raw[: raw.rindex(b"}")].rstrip()
        more = [b'"input":[', b",".join(items), b"],"] if changed else []
        body = b"".join([own, b"" if own.endswith(b"{") else b",", *more, KEPT_ELSEWHERE])
    return ResponseRequest(body, wants, items if wants else ())


def _why(keeps: bool) -> str:
    if not keeps:
        return ": this server keeps no responses (--responses-size 0); send the whole conversation in input"
    return (
        "; it was dropped or deleted, had store: false, belongs to another key, or another server keeps it. "
        "Send the whole conversation in input"
    )


def _text(value: msgspec.Raw) -> str:
    return "" if value in (ABSENT, NULL) else msgspec.json.decode(value, type=str)


def _items(value: msgspec.Raw) -> list[bytes]:
    """Return the items of ``input`` as JSON. A text is a message of the user."""
    if value in (ABSENT, NULL):
        return []
    if bytes(memoryview(value)[:1]) == b'"':
        return [b'{"type":"message","role":"user","content":' + bytes(value) + b"}"]
    return [bytes(item) for item in msgspec.json.decode(value, type=list[msgspec.Raw])]


def _resolved(item: bytes, place: int, find: Find, keeps: bool) -> bytes:
    """Return the item that a reference names, or ``item`` itself if it is none. Raises ``NotKept``."""
    if REFERENCE not in item:
        return item
    try:
        reference = msgspec.json.decode(item, type=_Item)
    except msgspec.MsgspecError:
        return item
    if bytes(reference.type) != REFERENCE:
        return item
    if (match := ITEM_ID.fullmatch(reference.id)) is not None:
        for name in (RESPONSE_PREFIX + match[1], match[1]):
            output = output_of(kept.response) if (kept := find(name)) is not None else []
            if int(match[2]) < len(output):
                return bytes(output[int(match[2])])
    raise NotKept(f"input[{place}].id", f"{reference.id[:128]!r} is not an item that is kept here{_why(keeps)}")
