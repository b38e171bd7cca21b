"""A client's JSON body, parsed once, and what each leg is sent instead of it.

A client's own ``bootstrap_…`` fields go no further than here, whoever serves the request: they name a host that an
instance would connect to, and tell the secret of its data port.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import msgspec
import orjson

from ..runtime.cluster_secret import BootstrapSignature
from ..runtime.web.body import MAX_PROMPTS
from .errors import BadRequestError
from .instance import Instance

ROOM_BITS = 63
BOOTSTRAP_PREFIX = "bootstrap_"
"""Of the fields that the router alone sets."""
PROMPT_FIELDS = ("input_ids", "prompt", "text")
BYTES_PER_TOKEN = 4
"""Bytes of UTF-8 that a token has, about: enough to tell a long prompt from a short one."""
MAX_STRINGS = 1 << 17
"""Maximum number of strings, names of fields among them, in a body whose names must be looked at one by one."""
STEP = 4 << 20
"""Bytes that are searched at a time."""
ABSENT, NULL, TRUE = msgspec.Raw(b""), msgspec.Raw(b"null"), msgspec.Raw(b"true")
EMPTY = re.compile(rb"\s*\{\s*\}\s*")
LIST = re.compile(rb"\[\s*([^\s\]])")
"""Begins a list that is not empty."""

T = TypeVar("T")


class _Fields(msgspec.Struct):
    """What the router looks at in a body.

    Values stay JSON: to build objects of a million numbers takes ten times as long as to skip them.
    """

    stream: msgspec.Raw = ABSENT
    stream_options: msgspec.Raw = ABSENT
    rid: msgspec.Raw = ABSENT
    input_ids: msgspec.Raw = ABSENT
    prompt: msgspec.Raw = ABSENT
    text: msgspec.Raw = ABSENT
    messages: msgspec.Raw = ABSENT


class _AnyList(msgspec.Struct, array_like=True):
    """A list whose entries are skipped."""


class PairBodies(NamedTuple):
    """What the two legs of a pair are sent, in pieces: both share the client's own bytes."""

    prefill: Sequence[bytes | memoryview]
    decode: Sequence[bytes | memoryview]


@dataclass(frozen=True)
class RequestBody:
    """A request as the client sent it, ``raw``, less its ``bootstrap_…`` fields, and what the router must know of it.

    The parsed fields themselves are not kept: a stream may last for minutes, and they are many times as large.
    ``batch_size``: how many prompts a batch holds; None for a single prompt (and for what the instance will refuse).
    ``prompt_tokens``: how long the prompts are, all together, counted where they are token ids, guessed where they are
    text. ``request_id``: found in the rids that are drawn, for clients that gave none. ``rid_prefix``: begins the ids
    that the API answers with; a drawn rid becomes one.
    """

    raw: bytes
    stream: bool
    batch_size: int | None
    prompt_tokens: int
    is_empty: bool
    has_rid: bool
    has_stream_options: bool
    request_id: str
    rid_prefix: str

    @classmethod
    def parse(cls, raw: bytes, request_id: str = "", rid_prefix: str = "") -> RequestBody:
        """Raises ``BadRequestError`` for anything but a JSON object, and for one with too many prompts.

        No bytes at all are an object without fields, of which an instance says what it lacks.
        """
        raw = without_bootstrap_fields(raw or b"{}")
        fields = _decode(raw, _Fields)
        if not raw.isascii():
            _check_utf8(raw)
        prompts = [_Prompt.read(name, getattr(fields, name)) for name in PROMPT_FIELDS]
        prompt_tokens = next((prompt.tokens for prompt in prompts if prompt.tokens), None)
        return cls(
            raw=raw,
            stream=fields.stream == TRUE,
            batch_size=next((prompt.batch_size for prompt in prompts if prompt.batch_size is not None), None),
            prompt_tokens=_chat_tokens(fields.messages) if prompt_tokens is None else prompt_tokens,
            is_empty=EMPTY.fullmatch(raw) is not None,
            has_rid=fields.rid not in (ABSENT, NULL),
            has_stream_options=fields.stream_options != ABSENT,
            request_id=request_id,
            rid_prefix=rid_prefix,
        )

    def for_pair(self, prefill: Instance, signature: BootstrapSignature | None = None) -> PairBodies:
        """Bodies for ``prefill`` and any decode, with a fresh room, and a fresh rid where the client gave none.

        The same rid goes to both legs, so that one ``/abort_request`` ends both. The prefill is never asked to
        stream: only its status matters, and a plain answer shows an error in the status. ``signature`` vouches for
        the address and the rooms.
        """
        count = self.batch_size
        host, port = prefill.bootstrap_address
        patch: dict[str, Any]
        if count is None:
            patch = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": draw_room()}
        else:
            patch = {
                "bootstrap_host": [host] * count,
                "bootstrap_port": [port] * count,
                "bootstrap_room": [draw_room() for _ in range(count)],
            }
        if signature is not None:
            fields = (patch["bootstrap_host"], patch["bootstrap_port"], patch["bootstrap_room"])
            patch["bootstrap_signature"] = signature.sign(*fields, time.time())
        if not self.has_rid:
            patch["rid"] = self.rid_prefix + draw_rid(self.request_id)
        for_prefill = {"stream": False, "bootstrap_leg": "prefill"} | (
            {"stream_options": None} if self.has_stream_options else {}
        )
        return PairBodies(self._with(patch | for_prefill), self._with(patch | {"bootstrap_leg": "decode"}))

    def _with(self, patch: dict[str, Any]) -> list[bytes | memoryview]:
        """Return pieces: ``raw``, and the fields of ``patch`` after its own.

        ``raw`` is not copied: it may be 32 MiB long. Of two fields with one name, instances take the last one.
        """
        own = memoryview(self.raw)[: self.raw.rindex(b"}")]
        return [own, b"" if self.is_empty else b",", orjson.dumps(patch)[1:]]


def _decode(data: bytes | msgspec.Raw, kind: type[T]) -> T:
    """Decode JSON. Raises ``BadRequestError`` for what is none, or no object."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError:
        raise BadRequestError("the body must be a JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise BadRequestError(f"the body is not valid JSON: {exc}") from None


def _check_utf8(raw: bytes) -> None:
    try:
        raw.decode()
    except UnicodeDecodeError as exc:
        raise BadRequestError(f"the body is not valid JSON: {exc}") from None


def without_bootstrap_fields(raw: bytes) -> bytes:
    """Return ``raw`` less its ``bootstrap_…`` fields; the same object where there are none, which is the common case.

    Raises ``BadRequestError`` for anything but a JSON object.
    """
    # A name may be spelled with escapes.
    if not _contains(raw, BOOTSTRAP_PREFIX.encode()) and not _contains(raw, b"\\u00"):
        return raw
    if _strings(raw) > MAX_STRINGS:
        raise BadRequestError(f"the body holds more than {MAX_STRINGS} strings; send fewer prompts at a time")
    fields = _decode(raw, dict[str, msgspec.Raw])
    kept = {name: value for name, value in fields.items() if not name.startswith(BOOTSTRAP_PREFIX)}
    return raw if len(kept) == len(fields) else msgspec.json.encode(kept)


def _contains(data: bytes, part: bytes) -> bool:
    """Whether ``part`` is in ``data``; looked for in steps, as of some data each takes long."""
    return any(data.find(part, at, at + STEP + len(part)) >= 0 for at in range(0, len(data), STEP))


def _strings(data: bytes) -> int:
    """Count the strings of JSON. Those that end in a backslash may count half."""
    return (data.count(b'"') - data.count(b'\\"')) // 2


class _Prompt(NamedTuple):
    """What one of ``PROMPT_FIELDS`` holds. ``tokens`` is 0 where it is not there, or no prompt."""

    batch_size: int | None = None
    tokens: int = 0

    @classmethod
    def read(cls, name: str, value: msgspec.Raw) -> _Prompt:
        """Measure a field without building its values. Raises ``BadRequestError`` for too many prompts."""
        kind = bytes(memoryview(value)[:1])
        if kind == b'"':
            return cls(tokens=_text_tokens(value))
        data = bytes(value) if kind == b"[" else b""
        first = LIST.match(data)
        if first is None:
            return cls()
        if first[1] not in (b'"', b"["):
            return cls(tokens=data.count(b",") + 1)
        # An upper limit is known before the prompts are: so many of them would take long.
        are_texts = first[1] == b'"'
        most = _strings(data) if are_texts else data.count(b"[") - 1
        size = len(_entries(data, are_texts)) if most <= MAX_PROMPTS else most
        if size > MAX_PROMPTS:
            raise BadRequestError(f"{name}: more than {MAX_PROMPTS} prompts in one request")
        if not size:
            return cls(tokens=1)  # an instance will say what is wrong with it
        return cls(size, len(data) // BYTES_PER_TOKEN if are_texts else data.count(b",") + 1)


def _entries(data: bytes, are_texts: bool) -> Sequence[Any]:
    """The prompts of a batch; none where they are not all of one kind."""
    try:
        return (
            msgspec.json.decode(data, type=list[str]) if are_texts else msgspec.json.decode(data, type=list[_AnyList])
        )
    except msgspec.ValidationError:
        return ()


def _chat_tokens(messages: msgspec.Raw) -> int:
    """Tokens of a chat, whose roles and names of fields count as well."""
    return _text_tokens(messages) if bytes(memoryview(messages)[:1]) == b"[" else 0


def _text_tokens(value: msgspec.Raw) -> int:
    """Tokens of JSON that is text, or holds some.

    By bytes, not by characters: of Chinese or Japanese, a token has about one character, which has three bytes. Clients
    that write it with escapes send twice as many, and are thought to ask for twice as much.
    """
    return (len(memoryview(value)) - 2) // BYTES_PER_TOKEN + 1


def draw_room() -> int:
    """A fresh room. 0 means "nothing has landed" to other servers that speak this protocol, so it is never drawn."""
    return secrets.randbits(ROOM_BITS) or 1


def draw_rid(request_id: str) -> str:
    """A fresh name for an attempt at request ``request_id``, in which that is found.

    Not the id alone: clients send one again when they try again, and so does this router.
    """
    return f"{request_id}-{secrets.token_hex(8)}" if request_id else secrets.token_hex(16)
