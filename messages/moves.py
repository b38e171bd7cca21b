"""Migration of a running request to another instance: its description, and the messages of the two instances.

The source offers the request and goes on with it. The target takes the KV of whole pages by an ordinary hand-over. Only
then the source stops, and sends the tokens that it has generated since::

    ──MoveOffer──▶  ◀──RoomQueued, TransferRequest──  ──TransferDone──▶  ◀──MoveReady──  ──MoveCommit──▶  ◀──MoveTaken──

Until ``MoveTaken`` the request belongs to the source, which goes on with it if anything fails.

These messages come over the network, so every field is bounded (see ``handover.py``). ``problem_of`` checks what the
bounds of single fields cannot express.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from .base import MAX_TOKENS, Epoch, HandoverId, Message, Reason, unpack_i32
from .handover import Tokens, check_timing
from .outputs import CachedBeyond, Timing, TokenLogprob
from .question import Answer, Question
from .requests import MAX_TOP_LOGPROBS, GenerateReq
from .sampling import COLUMNS, MAX_BIAS, MAX_STOP_CHARS, MAX_STOPS, OutputMarks, SamplingParams

MAX_NAME_CHARS = 1024
MAX_IDS = 1 << 12
"""Maximum number of token ids that stop a request or have a bias."""
MAX_AGE_SECONDS = 1e9

Key = Annotated[str, Meta(min_length=16, max_length=64)]
"""Secret that allows a client to read the rest of one migrated answer. The target instance draws it at random."""
TokenBytes = Annotated[bytes, Meta(max_length=1 << 24)]


class RunningRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Description of a running request: all that another instance needs to go on with it, except its KV.

    The sampler needs no more state: its next choices follow from the request and the position.
    """

    request: GenerateReq
    """The request as the client sent it."""
    output: TokenBytes
    """Token ids that it has generated so far (int32)."""
    max_new_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    """Maximum length of the output, which may be less than the client asked for."""
    age: Annotated[float, Meta(ge=0, le=MAX_AGE_SECONDS)]
    """Seconds since its arrival. A time would be useless: the clocks of two hosts cannot be compared."""


class MoveOffer(Message):
    """Source → target: take this request, and ask for the KV of its first ``kv_len`` tokens."""

    epoch: Epoch
    handover: HandoverId
    running: RunningRequest
    kv_len: Tokens
    """Tokens with KV that can be sent, in whole pages; 0: none."""
    keep: bool = False
    """True for a KV return: the request has ended, and the target only caches its KV for later requests."""


class MoveReady(Message):
    """Target → source: the KV has arrived, so the request can continue here. Send what it has generated meanwhile."""

    epoch: Epoch
    handover: HandoverId


class MoveCommit(Message):
    """Source → target: the request is paused here. ``output``: the tokens generated after those of the offer (int32).

    ``logprobs`` are those of the whole output, and ``input_logprobs`` those of the prompt, if the client asked for
    them.
    """

    epoch: Epoch
    handover: HandoverId
    output: TokenBytes
    cached_tokens: Tokens
    retractions: Tokens
    first_token_age: Annotated[float, Meta(ge=0, le=MAX_AGE_SECONDS)]
    timing: Timing
    logprobs: list[TokenLogprob] = []
    input_logprobs: list[TokenLogprob] | None = None
    cached_beyond: CachedBeyond | None = None

    def __post_init__(self) -> None:
        check_timing(self.timing)


class MoveTaken(Message):
    """Target → source: the request continues here.

    A client reads the rest of its answer by ``key`` (HTTP, ``port``).
    """

    epoch: Epoch
    handover: HandoverId
    key: Key
    port: Annotated[int, Meta(ge=1, le=65535)]


class MoveRefused(Message):
    """Either way: the request cannot continue on the target. No further message about this migration follows."""

    epoch: Epoch
    handover: HandoverId
    reason: Reason


MoveMessage = MoveOffer | MoveReady | MoveCommit | MoveTaken | MoveRefused


class ReqMoved(Message):
    """Scheduler → detokenizer → HTTP: the rest of the request's answer is at instance ``epoch``, under this address
    and key.
    """

    rid: str
    epoch: str
    host: str
    port: int
    key: str


class ReqArrived(Message):
    """Scheduler → detokenizer → HTTP: a migrated request goes on here. Its whole output follows."""

    rid: str
    key: str
    """Secret that allows a client to read the answer."""
    arrival: float
    output_tokens: int
    """Tokens at the beginning of the output that the source instance generated."""


class MigrateResult(Answer):
    """Scheduler → HTTP: result of a ``MigrateReq``."""

    paused_ms: float
    """Time in which the request made no progress here."""


class MigrateReq(Question[MigrateResult]):
    """HTTP → scheduler: migrate a request to the instance with this bootstrap address."""

    rid: str
    host: str
    port: int


def problem_of(running: RunningRequest, vocab_size: int) -> str | None:
    """Return what is wrong with a peer's description of a request, as a clause about "it"; None for a valid one."""
    req = running.request
    for name, data in (("prompt", req.input_ids), ("output", running.output)):
        if problem := tokens_problem(name, data, vocab_size):
            return problem
    if not req.input_ids:
        return "it has no prompt"
    if any(len(name) > MAX_NAME_CHARS for name in (req.rid, req.extra_key, req.key_name, req.user)):
        return "its names are too long"
    if not all(name.isprintable() for name in (req.rid, req.key_name, req.user)):
        return "its names have characters that can't be printed"
    if not 0 <= req.timeout_s <= MAX_AGE_SECONDS or abs(req.priority) >= 1 << 31:
        return "its timeout or its priority is out of range"
    if req.logprobs is not None and not (
        -1 <= req.logprobs.start_len <= MAX_TOKENS and 0 <= req.logprobs.top_num <= MAX_TOP_LOGPROBS
    ):
        return "the logprobs that it asks for are out of range"
    return _sampling_problem(req.sampling, req.stop_ids, vocab_size)


def tokens_problem(name: str, data: bytes, vocab_size: int) -> str | None:
    """Return what is wrong with token ids (int32 bytes), as a clause about "it"; None for valid ones.

    ``name``: what the clause calls the tokens, such as "prompt". ``vocab_size``: exclusive limit of their ids.
    """
    if len(data) % 4:
        return f"its {name} is not int32"
    tokens = unpack_i32(data)
    if len(tokens) and not (tokens.min() >= 0 and tokens.max() < vocab_size):
        return f"its {name} has tokens outside the vocabulary"
    return None


def _sampling_problem(p: SamplingParams, stop_ids: tuple[int, ...], vocab_size: int) -> str | None:
    ids = [*stop_ids, *p.stop_token_ids, *p.logit_bias]
    if len(ids) > MAX_IDS or not all(0 <= i < vocab_size for i in ids):
        return "its stop tokens or biases are of tokens outside the vocabulary"
    if len(p.stop) > MAX_STOPS or any(len(string) > MAX_STOP_CHARS for string in p.stop):
        return "its stop strings are too many or too long"
    marks = p.marks or OutputMarks()
    if len(marks.shown) > MAX_STOPS or any(len(text) > MAX_STOP_CHARS for text in (*marks.shown, *marks.reasoning)):
        return "the marks of its answer are too many or too long"
    if not 1 <= p.max_new_tokens <= MAX_TOKENS:
        return f"its max_new_tokens is {p.max_new_tokens}, which is not within 1 and {MAX_TOKENS}"
    # What clients may ask for, and no more: logits would become infinite, as if the model were broken.
    for name, column in COLUMNS.items():
        value = getattr(p, name)
        if not column.least <= value <= column.most:
            return f"its {name} is {value}, which is not within {column.least} and {column.most}"
    if not all(-MAX_BIAS <= bias <= MAX_BIAS for bias in p.logit_bias.values()):
        return "its biases are out of range"
    return None
