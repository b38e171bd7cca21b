"""Reads what a request for a response says about kept ones, and puts the conversation so far into its input."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from .response_store import KeptResponse, output_of

ABSENT, NULL, FALSE = msgspec.Raw(b""), msgspec.Raw(b"null"), msgspec.Raw(b"false")
REFERENCE = b'"item_reference"'
ITEM_ID = re.compile(r"[a-z]{1,8}_(.*)_([0-9]{1,6})")
"""Id of an item: its kind, the id of its response without the prefix, and its place in the output."""
RESPONSE_PREFIX = "resp_"
KEPT_ELSEWHERE, NOT_STORED = b'"kept_elsewhere":true', b'"store":false'
Find = Callable[[str], KeptResponse | None]
"""Finds a kept response of the client by its id."""


class RequestRefused(Exception):
    """A request that can't be passed on. ``status``: that of the answer. ``param``: the field that is the reason."""

    status = 400
    code: str | None = None

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class NotKept(RequestRefused):
    """The request names a response or an item that is not kept."""

    code = "previous_response_not_found"


class InputTooLong(RequestRefused):
    """The input is too long with what the request names."""

    status = 413


class _KeptFields(msgspec.Struct):
    """The fields of a body that are about kept responses. Values stay JSON."""

    input: msgspec.Raw = ABSENT
    previous_response_id: msgspec.Raw = ABSENT
    store: msgspec.Raw = ABSENT
    kept_elsewhere: msgspec.Raw = ABSENT
    bootstrap_room: msgspec.Raw = ABSENT


class _AnyObject(msgspec.Struct):
    """An object; its fields are skipped."""


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
    items: bytes
    """Items of the conversation before the response, JSON without the brackets of a list. They are held until it has
    ended. Empty if it is not to be kept.
    """

    def unkept(self) -> ResponseRequest:
        """Return the request for a response that is not kept, and says so."""
        return ResponseRequest(_with(self.body, [NOT_STORED]), False, b"")


def read_request(raw: bytes, find: Find, limit: int, *, keeps: bool, is_first: bool) -> ResponseRequest:
    """Read a request's body.

    A body that is not valid is passed on as it is: the API's own reader refuses it. ``find``: finds kept responses.
    ``limit``: maximum length of a body that is passed on. ``keeps``: whether this server keeps responses at all.
    ``is_first``: whether instances stand behind this server, which are told to keep nothing. Raises ``RequestRefused``.
    """
    try:
        fields = msgspec.json.decode(raw, type=_KeptFields)
        previous = _text(fields.previous_response_id)
        has_references = REFERENCE in raw
        new = _items(fields.input, apart=has_references)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ResponseRequest(raw, False, b"")
    is_leg = fields.bootstrap_room not in (ABSENT, NULL)
    if not is_first and (is_leg or fields.kept_elsewhere not in (ABSENT, NULL, FALSE)):
        # A router keeps it, or knows nothing of it, and no other instance of the pair does.
        return ResponseRequest(raw, False, b"")
    named = _NamedResponses(find, keeps)
    changed = bool(previous) or has_references
    items = b",".join(_joinable(named.conversation(previous, new), limit - len(raw)) if changed else new)
    wants = fields.store != FALSE
    more = [b'"input":[' + items + b"]"] if changed else []
    if wants and not keeps:
        more.append(NOT_STORED)
    if changed or (wants and is_first):
        more.append(KEPT_ELSEWHERE)
    return ResponseRequest(_with(raw, more), wants and keeps, items if wants and keeps else b"")


def _with(body: bytes, fields: Sequence[bytes]) -> bytes:
    """Return the JSON object ``body`` with ``fields``, each a name and a value. Of one name's fields, the last counts.

    Without fields, it is the same object.
    """
    if not fields:
        return body
    own = body[: body.rindex(b"}")].rstrip()
    return b"".join([own, b"" if own.endswith(b"{") else b",", b",".join(fields), b"}"])


def _joinable(pieces: Iterable[bytes], room: float) -> list[bytes]:
    """Return the ``pieces`` that are not empty. Raises ``InputTooLong`` if they are longer than ``room`` together."""
    found = []
    for piece in pieces:
        if piece:
            found.append(piece)
            room -= len(piece) + 1
        if room < 0:
            raise InputTooLong(
                "input", "is too long with the kept items that the request names; begin a new conversation"
            )
    return found


class _NamedResponses:
    """The kept responses that one request names. Each one is parsed once, however often it is named."""

    def __init__(self, find: Find, keeps: bool) -> None:
        self._find = find
        self._why = _why(keeps)
        self._outputs: dict[str, list[msgspec.Raw]] = {}

    def conversation(self, previous: str, new: list[bytes]) -> Iterator[bytes]:
        """Yield the conversation of response ``previous``, if it is not empty, and the ``new`` items.

        References are replaced by the items that they name. Raises ``NotKept``.
        """
        if previous:
            kept = self._find(previous)
            if kept is None:
                raise NotKept("previous_response_id", f"{previous[:128]!r} is not kept here{self._why}")
            yield kept.items
            yield from map(bytes, self._output(previous))
        for i, item in enumerate(new):
            yield self._resolved(item, i)

    def _resolved(self, item: bytes, place: int) -> bytes:
        """Return the item that a reference names, or ``item`` itself if it is none. Raises ``NotKept``."""
        if REFERENCE not in item:
            return item
        try:
            reference = msgspec.json.decode(item, type=_Item)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return item
        if bytes(reference.type) != REFERENCE:
            return item
        if (match := ITEM_ID.fullmatch(reference.id)) is not None:
            for name in (RESPONSE_PREFIX + match[1], match[1]):
                output = self._output(name)
                if int(match[2]) < len(output):
                    return bytes(output[int(match[2])])
        raise NotKept(f"input[{place}].id", f"{reference.id[:128]!r} is not an item that is kept here{self._why}")

    def _output(self, response_id: str) -> list[msgspec.Raw]:
        if response_id not in self._outputs:
            kept = self._find(response_id)
            self._outputs[response_id] = output_of(kept.response) if kept is not None else []
        return self._outputs[response_id]


def _why(keeps: bool) -> str:
    if not keeps:
        return ": this server keeps no responses (--responses-size 0); send the whole conversation in input"
    return (
        "; it was dropped or deleted, had store: false, was too large (--responses-quota), belongs to another key, or "
        "another server keeps it. "
        "Send the whole conversation in input"
    )


def _text(value: msgspec.Raw) -> str:
    return "" if value in (ABSENT, NULL) else msgspec.json.decode(value, type=str)


def _items(value: msgspec.Raw, *, apart: bool) -> list[bytes]:
    """Return the items of ``input`` as JSON without brackets, each by itself if ``apart``, else in one piece.

    A text is a message of the user.
    """
    if value in (ABSENT, NULL):
        return []
    kind = bytes(memoryview(value)[:1])
    if kind == b'"':
        return [b'{"type":"message","role":"user","content":' + bytes(value) + b"}"]
    if kind == b"[" and not apart:
        return [bytes(memoryview(value)[1:-1]).strip()]
    # A list of other values is refused at the first one, however long it is: each would take a hundred bytes.
    msgspec.json.decode(value, type=list[_AnyObject])
    return [bytes(item) for item in msgspec.json.decode(value, type=list[msgspec.Raw])]
