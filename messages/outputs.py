"""Messages that carry results outwards: scheduler → detokenizer → HTTP."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import msgspec

from .base import Message
from .sampling import OutputMarks


class FinishType(StrEnum):
    """Kind of a request's end."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    DECLINED = "declined"
    """End of a prefill's leg: the decode computes the prompt itself."""
    TIMEOUT = "timeout"
    """The request took longer than its client wanted to wait."""


class FinishReason(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Reason of a request's end."""

    type: FinishType
    matched: int | str | None = None
    """Token id or stop string that ended the output, for ``STOP``."""
    message: str = ""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability (natural log of the model's own distribution, before temperature and penalties) of a token.

    ``logprob`` is None for a prompt's first token. ``top``: (token id, logprob), best first.
    """

    token_id: int
    logprob: float | None
    top: list[tuple[int, float]] = []


class NamedLogprob(msgspec.Struct, frozen=True, array_like=True):
    """A ``TokenLogprob`` with what its tokens read. Made by the detokenizer, as it alone knows the vocabulary.

    ``data``: the token's own bytes, which may be a part of a character. ``chars``: characters of the text that became
    certain with it, 0 for a special token that is not shown. ``top``: (token id, logprob, bytes), best first.
    """

    token_id: int
    logprob: float | None
    data: bytes
    chars: int
    top: list[tuple[int, float, bytes]] = []


class Timeline(msgspec.Struct, forbid_unknown_fields=True):
    """The turning points of a hand-over, in ms since the request came to the decode instance; 0 where there was none.

    ``bootstrap``: the prefill is connected. ``allocate``: there is memory for the KV. ``queue``: the prefill begins to
    compute. ``prefill``: it has the first token. ``first_byte`` and ``last_byte``: of the KV that it pushes, when it
    begins and when all has landed. ``verify``: the KV was found right. ``first_step``: the decode's first own token.

    What the prefill says of it, before the decode has added its own, counts from when both ends were there.
    """

    bootstrap: float = 0.0
    allocate: float = 0.0
    queue: float = 0.0
    prefill: float = 0.0
    first_byte: float = 0.0
    last_byte: float = 0.0
    verify: float = 0.0
    first_step: float = 0.0


InstanceRole = Literal["unified", "prefill", "decode"]
"""What an instance is to a request: the prefill or the decode of its hand-over, else what it is offered."""


class Phase(StrEnum):
    """What a request is doing, in the order in which a request first passes through the phases.

    TOKENIZE: on its way from HTTP through the tokenizer. QUEUE: waiting for memory, its turn, KV of other tiers or the
    other instance. PREFILL: its prompt is computed, or after a retraction prompt and output again. TRANSFER: the prompt
    is computed, and its KV is under way. DECODE: output is generated. REPLY: the last token is on its way through the
    detokenizer to HTTP.
    """

    TOKENIZE = "tokenize"
    QUEUE = "queue"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE = "decode"
    REPLY = "reply"


class PhaseTime(msgspec.Struct, frozen=True, array_like=True):
    """Milliseconds that a request spent in a phase on one instance."""

    phase: Phase
    at: InstanceRole
    ms: float


class Timing(msgspec.Struct, forbid_unknown_fields=True):
    """Where a request's time went (ms) and what its hand-over moved (bytes).

    The fields named after phases are sums of ``phases`` over all instances.
    """

    tokenize_ms: float = 0.0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    transfer_ms: float = 0.0
    transfer_bytes: int = 0
    decode_ms: float = 0.0
    detokenize_ms: float = 0.0
    """Time that the detokenizer spent on the request, most of it during DECODE. Set at the end."""
    first_token_ms: float = 0.0
    """From the request's arrival until its first token was known; 0 without one."""
    push_ms: float = 0.0
    """Time that the transfer engine spent sending the KV. Set on a prefill's leg."""
    ahead_ms: float = 0.0
    """Part of ``prefill_ms`` before the decode had asked. Set in a prefill's messages to a decode."""
    here: InstanceRole = "unified"
    """Role of the answering instance for this request."""
    phases: list[PhaseTime] = []
    timeline: Timeline | None = None


Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]


class CachedBeyond(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cached tokens of a request that were not in the pool but in a tier."""

    host: Count
    """Tokens found in host memory."""
    store: Count
    """Tokens read from the store."""


class HeldTokens(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens of a handed-over prompt that the decode had cached itself, so that their KV was not sent."""

    device: Count
    """Tokens found in the pool."""
    host: Count
    """Tokens found in host memory."""
    store: Count
    """Tokens read from the decode's store."""


class ReqMeta(msgspec.Struct, forbid_unknown_fields=True):
    """Facts about a request, complete at its end."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    timing: Timing
    retractions: int = 0
    route: str = "local"
    """Route: "local", or the direction of the request's hand-over here ("outgoing" or "incoming")."""
    cached_beyond: CachedBeyond | None = None
    """None if the instance that computed the prompt has no tiers."""
    held: HeldTokens | None = None
    """None if nothing was handed over, or the decode has no tiers."""


class PromptReport(msgspec.Struct, array_like=True):
    """The parts of a prompt that the client asked to get back."""

    token_ids: bytes
    """Token ids (int32); empty if not requested."""
    logprobs: list[TokenLogprob] | None
    readout: bytes = b""
    """Vector (float32) that was read from the pass over the prompt; empty if not requested."""


class PromptText(msgspec.Struct, array_like=True):
    """A ``PromptReport`` after detokenization."""

    text: str
    """Text of ``token_ids``."""
    token_ids: list[int]
    logprobs: list[NamedLogprob] | None
    readout: bytes = b""
    """As in ``PromptReport``."""


class DetokenizeInit(msgspec.Struct, forbid_unknown_fields=True):
    """Settings of a request that the detokenizer needs; sent with its first tokens."""

    stop: tuple[str, ...]
    skip_special_tokens: bool
    prompt_tail: bytes
    """The prompt's last few token ids (int32): context that decides how the first output token reads."""
    min_tokens: int = 0
    """Output tokens that must be there before a stop string can end the request."""
    marks: OutputMarks | None = None
    """Format of the answer; None: plain text."""


class ReqTokens(msgspec.Struct, array_like=True):
    """New tokens of one request in a step; ``finish`` and ``meta`` come with the last of them.

    ``init`` and, where it is wanted, ``prompt`` come once, with the first of them.
    """

    rid: str
    token_ids: list[int]
    finish: FinishReason | None = None
    meta: ReqMeta | None = None
    logprobs: list[TokenLogprob] | None = None
    init: DetokenizeInit | None = None
    prompt: PromptReport | None = None


class TokenBatch(Message):
    """Scheduler → detokenizer: all new tokens of a step."""

    items: list[ReqTokens]


class ReasoningReport(msgspec.Struct, frozen=True, array_like=True):
    """What the detokenizer knows of the reasoning in an answer."""

    begins_open: bool
    """Whether the prompt ends within reasoning."""
    tokens: int = 0
    """Output tokens that belong to reasoning so far."""


class ReqText(msgspec.Struct, array_like=True):
    """New text of one request; ``token_ids`` are the tokens released with it (a stop string cuts both).

    ``prompt`` comes once, where it is wanted. ``reasoning`` comes with the first and the last text of an answer in
    a format with reasoning, and with each text that changes it.
    """

    rid: str
    text: str
    token_ids: list[int]
    finish: FinishReason | None = None
    meta: ReqMeta | None = None
    logprobs: list[NamedLogprob] | None = None
    prompt: PromptText | None = None
    reasoning: ReasoningReport | None = None


class TextBatch(Message):
    """Detokenizer → HTTP: all new text of a step."""

    items: list[ReqText]


class ReqError(Message):
    """A request ended in an error.

    From the tokenizer the message goes straight to HTTP. From the scheduler it goes through the detokenizer, after the
    request's tokens.
    """

    rid: str
    status: int
    """HTTP status."""
    message: str
    kind: str = "invalid_request_error"
    field: str | None = None
    """Name of the offending field, if there is one."""
    code: str | None = None
    """OpenAI's code for the error, if it has one."""
    retry_after: int = 0
    """Seconds after which a retry may succeed; 0 if unknown."""
    route: str = "local"
    """Route of the request, as in ``ReqMeta``."""
