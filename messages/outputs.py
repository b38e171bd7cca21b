"""Messages that carry results outwards: scheduler → detokenizer → HTTP."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from .base import Message


class FinishType(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class FinishReason(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why a request ended; ``matched`` is the token id or the stop string behind ``STOP``."""

    type: FinishType
    matched: int | str | None = None
    message: str = ""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability (natural log of the model's own distribution, before temperature and penalties) of a token.

    ``logprob`` is None for a prompt's first token. ``top``: (token id, logprob), best first.
    """

    token_id: int
    logprob: float | None
    top: list[tuple[int, float]] = []


class Timing(msgspec.Struct, forbid_unknown_fields=True):
    """Where a request's time went (ms) and what its hand-over moved (bytes)."""

    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    transfer_ms: float = 0.0
    transfer_bytes: int = 0
    decode_ms: float = 0.0
    detokenize_ms: float = 0.0


class ReqMeta(msgspec.Struct, forbid_unknown_fields=True):
    """What is known of a request when it ends."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    timing: Timing
    retractions: int = 0
    input_logprobs: list[TokenLogprob] | None = None


class DetokenizeInit(msgspec.Struct, forbid_unknown_fields=True):
    """What the detokenizer must know of a request; comes with its first tokens."""

    stop: tuple[str, ...]
    skip_special_tokens: bool
    prompt_tail: bytes
    """The prompt's last few token ids (int32): context that decides how the first output token reads."""


class ReqTokens(msgspec.Struct, array_like=True):
    """New tokens of one request in a step; ``finish`` and ``meta`` come with the last of them."""

    rid: str
    token_ids: list[int]
    finish: FinishReason | None = None
    meta: ReqMeta | None = None
    logprobs: list[TokenLogprob] | None = None
    init: DetokenizeInit | None = None


class TokenBatch(Message):
    """Scheduler → detokenizer: all new tokens of a step."""

    items: list[ReqTokens]


class ReqText(msgspec.Struct, array_like=True):
    """New text of one request; ``token_ids`` are the tokens released with it (a stop string cuts both)."""

    rid: str
    text: str
    token_ids: list[int]
    finish: FinishReason | None = None
    meta: ReqMeta | None = None
    logprobs: list[TokenLogprob] | None = None


class TextBatch(Message):
    """Detokenizer → HTTP: all new text of a step."""

    items: list[ReqText]


class ReqError(Message):
    """A request ended in an error. ``status`` is the HTTP status; ``field`` names the offending field, if any.

    From the tokenizer it goes straight to HTTP; from the scheduler through the detokenizer, behind the request's
    tokens.
    """

    rid: str
    status: int
    message: str
    kind: str = "invalid_request_error"
    field: str | None = None
