"""A client's JSON body, parsed once, and the bodies of the two legs.

A client's own ``bootstrap_…`` fields never leave the router. They name a host that an instance would connect to, and
send the secret of its data port.
"""

from __future__ import annotations

import codecs
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import msgspec
import orjson

from ..runtime.web.apis import NATIVE, PATHS
from ..runtime.web.body import MAX_PROMPTS
from ..runtime.web.paths import AtRouter, PathFacts
from .answer_count import ABSENT, count_answers
from .errors import BadRequestError
from .instance import Instance

ROOM_BITS = 63
BOOTSTRAP_PREFIX = "bootstrap_"
"""Prefix of the fields that only the router sets."""
BYTES_PER_TOKEN = 4
"""Approximate bytes of UTF-8 per token: enough to tell a long prompt from a short one."""
MAX_STRINGS = 1 << 17
"""Maximum number of strings, field names included, in a body with field names that must be checked one by one."""
MAX_KEY_BYTES = 1024
"""Bytes of a session key, or of another name, that count."""
STEP = 4 << 20
"""Bytes that are searched at a time."""
UTF8_STEP = 1 << 20
"""Bytes that are decoded at a time."""
NULL, EMPTY_TEXT, TRUE = msgspec.Raw(b"null"), msgspec.Raw(b'""'), msgspec.Raw(b"true")
EMPTY = re.compile(rb"\s*\{\s*\}\s*")
LIST = re.compile(rb"\[\s*([^\s\]])")
"""Beginning of a list that is not empty."""

T = TypeVar("T")


class _Fields(msgspec.Struct):
    """The fields of a body that the router reads whatever its path is.

    Values stay JSON: building objects of a million numbers takes ten times as long as skipping them.
    """

    stream: msgspec.Raw = ABSENT
    stream_options: msgspec.Raw = ABSENT
    rid: msgspec.Raw = ABSENT
    prompt_cache_key: msgspec.Raw = ABSENT
    user: msgspec.Raw = ABSENT
    extra_key: msgspec.Raw = ABSENT
    cache_salt: msgspec.Raw = ABSENT

    def given(self, names: Iterable[str]) -> dict[str, msgspec.Raw]:
        """Return the values of those fields of ``names`` that the body has and that are not null."""
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value not in (ABSENT, NULL)}


PATH_FIELDS = sorted(
    {name for facts in PATHS for names in (*facts.prompt_fields, facts.choice_fields) for name in names}
)
_AllFields = cast(
    "type[_Fields]",
    msgspec.defstruct("_AllFields", [(name, msgspec.Raw, ABSENT) for name in PATH_FIELDS], bases=(_Fields,)),
)
"""Type of a whole body: ``_Fields``, and the fields that paths declare."""


class _AnyList(msgspec.Struct, array_like=True):
    """A list; its entries are skipped."""


class PairBodies(NamedTuple):
    """The bodies of the two legs of a pair, in pieces: both share the client's own bytes."""

    prefill: Sequence[bytes | memoryview]
    decode: Sequence[bytes | memoryview]


@dataclass(frozen=True)
class RequestBody:
    """A client's request body, and what the router has to know about it.

    No parsed objects are kept. A stream may last for minutes, and they are many times as large as the bytes. Fields of
    type ``msgspec.Raw`` are parts of ``raw``, which they do not copy.
    """

    raw: bytes
    """Body as the client sent it, without its ``bootstrap_…`` fields."""
    stream: bool
    batch_size: int | None
    """Number of prompts of a batch. None for a single prompt, and for a batch that an instance refuses."""
    prompt_tokens: int
    """Total length of the prompts: counted if they are token ids, estimated if they are text."""
    answers: int
    """Number of answers to all prompts, as far as it counts as load: at most ``MAX_ANSWERS``."""
    is_empty: bool
    has_rid: bool
    has_stream_options: bool
    request_id: str
    """Id of the request, which becomes part of the rid that is drawn if the client gave none."""
    rid_prefix: str
    """Prefix of the API's ids, which a drawn rid begins with."""
    is_prompt_alone: bool = False
    """Whether the instance that computes the prompt answers, so that no decode takes part."""
    prompt: tuple[msgspec.Raw, ...] = ()
    """JSON of the fields that hold what the model reads, in the order of the prompt."""
    prompt_cache_key: bytes = b""
    """JSON of the field of that name, ``MAX_KEY_BYTES`` at most; empty without one."""
    user: bytes = b""
    """JSON of the field of that name, ``MAX_KEY_BYTES`` at most; empty without one."""
    cache_namespace: bytes = b""
    """JSON of ``extra_key`` or ``cache_salt``: requests share cached prefixes only within it. The length as above."""

    @classmethod
    def parse(cls, raw: bytes, request_id: str = "", facts: PathFacts = NATIVE) -> RequestBody:
        """Parse a body. Raises ``BadRequestError`` unless it is a JSON object without too many prompts.

        ``facts``: those of the path it was sent to. An empty body stands for an object without fields. An instance
        reports the missing ones.
        """
        raw = without_bootstrap_fields(raw or b"{}")
        fields = _decode(raw, _AllFields)
        if not raw.isascii():
            _check_utf8(raw)
        given = fields.given(facts.prompt_fields.prompts)
        prompts = [_Prompt.read(name, value) for name, value in given.items()]
        parts = fields.given(facts.prompt_fields.parts).values()
        streams = facts.stream_format.is_default
        batch_size = next((prompt.batch_size for prompt in prompts if prompt.batch_size is not None), None)
        return cls(
            raw=raw,
            stream=fields.stream == TRUE or (streams and fields.stream in (ABSENT, NULL)),
            batch_size=batch_size,
            prompt_tokens=next((prompt.tokens for prompt in prompts if prompt.tokens), 0)
            + sum(map(_text_tokens, parts)),
            answers=count_answers(batch_size or 1, fields.given(facts.choice_fields).values()),
            is_empty=EMPTY.fullmatch(raw) is not None,
            has_rid=fields.rid not in (ABSENT, NULL),
            has_stream_options=fields.stream_options != ABSENT,
            request_id=request_id,
            rid_prefix=facts.rid_prefix,
            is_prompt_alone=facts.at_router is AtRouter.READ_PROMPT,
            prompt=(*parts, *given.values()),
            prompt_cache_key=_start_of(fields.prompt_cache_key),
            user=_start_of(fields.user),
            cache_namespace=_start_of(fields.extra_key) or _start_of(fields.cache_salt),
        )

    def for_pair(self, prefill: Instance) -> PairBodies:
        """Make the bodies for ``prefill`` and any decode, with new rooms (hand-over ids), and a rid if there is none.

        The same rid goes to both legs, so that one ``/abort_request`` ends both. The prefill never streams, because
        only its status matters, and a plain answer shows an error in the status.
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
        if not self.has_rid:
            patch["rid"] = self.rid_prefix + draw_rid(self.request_id)
        for_prefill = {"stream": False, "bootstrap_leg": "prefill"} | (
            {"stream_options": None} if self.has_stream_options else {}
        )
        return PairBodies(self._with(patch | for_prefill), self._with(patch | {"bootstrap_leg": "decode"}))

    def _with(self, patch: dict[str, Any]) -> list[bytes | memoryview]:
        """Return the body with the fields of ``patch`` added at its end, in pieces that form one JSON object.

        ``raw`` is not copied, because it may be 32 MiB long. If a name occurs twice, instances take the last field.
        """
        own = memoryview(self.raw)[: self.raw.rindex(b"}")]
        return [own, b"" if self.is_empty else b",", orjson.dumps(patch)[1:]]


def _decode(data: bytes | msgspec.Raw, kind: type[T]) -> T:
    """Decode a JSON object as ``kind``. Raises ``BadRequestError`` if ``data`` is not valid JSON, or no object."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError:
        raise BadRequestError("the body must be a JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise BadRequestError(f"the body is not valid JSON: {exc}") from None


def _start_of(value: msgspec.Raw) -> bytes:
    """Return the first ``MAX_KEY_BYTES`` of a field's JSON; none if it is missing, null or an empty string."""
    return b"" if value in (NULL, EMPTY_TEXT) else bytes(memoryview(value)[:MAX_KEY_BYTES])


def _check_utf8(raw: bytes) -> None:
    """Raise ``BadRequestError`` if ``raw`` is not UTF-8.

    It is decoded in pieces. As one ``str``, a text with one emoji would take four times as much memory.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(raw), UTF8_STEP):
        cut = len(decoder.getstate()[0])
        piece = raw[start : start + UTF8_STEP]
        try:
            decoder.decode(piece, final=start + len(piece) == len(raw))
        except UnicodeDecodeError as exc:
            place = start - cut + exc.start
            raise BadRequestError(f"the body is not valid JSON: {exc.reason} of UTF-8 at position {place}") from None


def without_bootstrap_fields(raw: bytes) -> bytes:
    """Return ``raw`` without its ``bootstrap_…`` fields; the same object if there are none, which is the common case.

    A body without such names or escapes is not parsed. For others, raises ``BadRequestError`` if ``raw`` is no JSON
    object or has more than ``MAX_STRINGS`` strings.
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
    """Return whether ``part`` is in ``data``. The search goes in steps, because it is slow for some data."""
    return any(data.find(part, at, at + STEP + len(part)) >= 0 for at in range(0, len(data), STEP))


def _strings(data: bytes) -> int:
    """Count the strings in JSON ``data``, field names included. Those that end in a backslash may count half."""
    return (data.count(b'"') - data.count(b'\\"')) // 2


class _Prompt(NamedTuple):
    """Size of a field with a prompt, or with a list of them."""

    batch_size: int | None = None
    tokens: int = 0
    """Number of tokens; 0 if the field is missing, or is no prompt."""

    @classmethod
    def read(cls, name: str, value: msgspec.Raw) -> _Prompt:
        """Measure the prompt field ``name``: the number of its prompts, and of their tokens in all.

        ``value`` is its JSON. Token ids are counted. Tokens of texts are estimated from their bytes. Raises
        ``BadRequestError`` for more than ``MAX_PROMPTS`` prompts.
        """
        kind = bytes(memoryview(value)[:1])
        if kind == b'"':
            return cls(tokens=_text_tokens(value))
        data = bytes(value) if kind == b"[" else b""
        first = LIST.match(data)
        if first is None:
            return cls()
        if first[1] not in (b'"', b"["):
            return cls(tokens=data.count(b",") + 1)
        # An upper limit is cheap. Counting exactly would take long for too many prompts.
        are_texts = first[1] == b'"'
        most = _strings(data) if are_texts else data.count(b"[") - 1
        count = _count_texts if are_texts else _count_lists
        size = count(data) if most <= MAX_PROMPTS else most
        if size > MAX_PROMPTS:
            raise BadRequestError(f"{name}: more than {MAX_PROMPTS} prompts in one request")
        if not size:
            return cls(tokens=1)  # an instance reports what is wrong with it
        return cls(size, len(data) // BYTES_PER_TOKEN if are_texts else data.count(b",") + 1)


def _count_texts(data: bytes) -> int:
    """Count the texts in a JSON list that begins with one; 0 for mixed kinds. It does not decode them."""
    # Without escapes, every second piece between quotes is a text.
    pieces = data.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
    between, end = pieces[2:-1:2], pieces[-1]
    return len(between) + 1 if end.strip() == b"]" and all(piece.strip() == b"," for piece in between) else 0


def _count_lists(data: bytes) -> int:
    """Count the lists in a JSON list; 0 for mixed kinds."""
    try:
        return len(msgspec.json.decode(data, type=list[_AnyList]))
    except (msgspec.DecodeError, RecursionError):  # not only lists, or nested too deeply
        return 0


def _text_tokens(value: msgspec.Raw) -> int:
    """Estimate the tokens of JSON that is text, or contains text. Roles and field names count as well.

    Bytes are a better measure than characters. A token of Chinese or Japanese is about one character of three bytes.
    Clients that write such text with escapes send twice as many bytes, and get twice the estimate.
    """
    return (len(memoryview(value)) - 2) // BYTES_PER_TOKEN + 1


def draw_room() -> int:
    """Draw a room, the random id of a hand-over: 1 to 2**63 - 1.

    0 is never drawn. To other servers with this protocol it means that no KV has arrived.
    """
    return secrets.randbits(ROOM_BITS) or 1


def draw_rid(request_id: str) -> str:
    """Draw a random rid for an attempt at request ``request_id``. It contains that id, if there is one.

    The id alone would not do: clients reuse it in retries, and so does this router.
    """
    return f"{request_id}-{secrets.token_hex(8)}" if request_id else secrets.token_hex(16)
