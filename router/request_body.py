"""A client's JSON body, parsed once, and what each leg is sent instead of it.

A client's own ``bootstrap_…`` fields go no further than here, whoever serves the request: they name a host that an
instance would connect to, and tell the secret of its data port.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
        raw = raw or b"{}"
        try:
            fields = orjson.loads(raw)
        except orjson.JSONDecodeError as exc:
            raise BadRequestError(f"the body is not valid JSON: {exc}") from None
        if not isinstance(fields, dict):
            raise BadRequestError("the body must be a JSON object")
        for name in PROMPT_FIELDS:
            if (count := _batch_size(fields.get(name)) or 0) > MAX_PROMPTS:
                raise BadRequestError(f"{name}: {count} prompts in one request, the limit is {MAX_PROMPTS}")
        kept = {name: value for name, value in fields.items() if not name.startswith(BOOTSTRAP_PREFIX)}
        sizes = (_batch_size(kept.get(name)) for name in PROMPT_FIELDS)
        prompt = next((kept[name] for name in PROMPT_FIELDS if kept.get(name)), None)
        return cls(
            # The common case: instances get the client's own bytes.
            raw=raw if len(kept) == len(fields) else dump(kept),
            stream=kept.get("stream") is True,
            batch_size=next((size for size in sizes if size is not None), None),
            prompt_tokens=_tokens(prompt) if prompt else _chat_tokens(kept.get("messages")),
            is_empty=not kept,
            has_rid=kept.get("rid") is not None,
            has_stream_options="stream_options" in kept,
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


def dump(fields: dict[str, Any]) -> bytes:
    """JSON again; raises ``BadRequestError`` for what was parsed but is nested too deeply to be written."""
    try:
        return orjson.dumps(fields)
    except orjson.JSONEncodeError as exc:
        raise BadRequestError(f"the body can't be passed on: {exc}") from None


def _tokens(prompt: Any) -> int:
    if isinstance(prompt, list):
        # Two levels are all that an instance takes; what is nested deeper, it refuses.
        if _batch_size(prompt) is None:
            return len(prompt)
        return sum(len(item) if isinstance(item, list) else _text_tokens(item) for item in prompt)
    return _text_tokens(prompt)


def _chat_tokens(messages: Any) -> int:
    """Tokens of a chat's contents, which are strings or lists of parts."""
    contents = (
        [turn.get("content") for turn in messages if isinstance(turn, dict)] if isinstance(messages, list) else []
    )
    parts = [part for content in contents for part in (content if isinstance(content, list) else [content])]
    return sum(_text_tokens(part.get("text") if isinstance(part, dict) else part) for part in parts)


def _text_tokens(text: Any) -> int:
    if not isinstance(text, str):
        return 1
    # Bytes, not characters: of Chinese or Japanese, a token has about one character, which has three bytes.
    return (len(text) if text.isascii() else len(text.encode(errors="replace"))) // BYTES_PER_TOKEN + 1


def _batch_size(prompts: Any) -> int | None:
    is_batch = isinstance(prompts, list) and prompts and isinstance(prompts[0], str | list)
    return len(prompts) if is_batch else None


def draw_room() -> int:
    """A fresh room. 0 means "nothing has landed" to other servers that speak this protocol, so it is never drawn."""
    return secrets.randbits(ROOM_BITS) or 1


def draw_rid(request_id: str) -> str:
    """A fresh name for an attempt at request ``request_id``, in which that is found.

    Not the id alone: clients send one again when they try again, and so does this router.
    """
    return f"{request_id}-{secrets.token_hex(8)}" if request_id else secrets.token_hex(16)
