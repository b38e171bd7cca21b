"""A request that goes on elsewhere: what describes it, and what the two instances say to each other.

The one that has it offers it, and goes on with it meanwhile; the other takes the KV of whole pages by an ordinary
hand-over. Only then does the first one stop, and tell what it has generated since::

    ──MoveOffer──▶  ◀──RoomQueued, TransferRequest──  ──TransferDone──▶  ◀──MoveReady──  ──MoveCommit──▶  ◀──MoveTaken──

Until ``MoveTaken`` the request is the first one's, which goes on with it when anything fails.

These come over the network: every field is bounded (see ``handover.py``), and ``problem_of`` looks at what bounds of
single fields can't say.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from .base import Epoch, HandoverId, Message, Reason, unpack_i32
from .handover import MAX_TOKENS, Tokens, check_timing
from .outputs import CachedBeyond, Timing, TokenLogprob
from .requests import MAX_TOP_LOGPROBS, GenerateReq
from .sampling import (
    MAX_BIAS,
    MAX_PENALTY,
    MAX_STOP_CHARS,
    MAX_STOPS,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
    SamplingParams,
)

MAX_NAME_CHARS = 1024
MAX_IDS = 1 << 12
"""Token ids that stop a request or have a bias."""
MAX_AGE_SECONDS = 1e9

Key = Annotated[str, Meta(min_length=16, max_length=64)]
"""Who has it may read the rest of one moved answer: drawn at random by the instance that has it now."""
TokenBytes = Annotated[bytes, Meta(max_length=1 << 24)]


class RunningRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that another instance needs to go on with a request, but for its KV.

    ``request``: as the client meant it. ``output``: token ids that it has so far (int32). ``max_new_tokens``: how many
    it may have, which may be less than was asked for. ``age``: seconds since it came; clocks of two hosts can't be
    compared. What the sampler does next follows from the request and the position alone.
    """

    request: GenerateReq
    output: TokenBytes
    max_new_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    age: Annotated[float, Meta(ge=0, le=MAX_AGE_SECONDS)]


class MoveOffer(Message):
    """Take this request; the KV of its first ``kv_len`` tokens (whole pages; 0: none) can be asked for.

    ``keep``: it is over; its KV is offered for who comes with the same tokens next, and nothing is to be computed.
    """

    epoch: Epoch
    handover: HandoverId
    running: RunningRequest
    kv_len: Tokens
    keep: bool = False


class MoveReady(Message):
    """It can begin here; say what it has become meanwhile."""

    epoch: Epoch
    handover: HandoverId


class MoveCommit(Message):
    """It stands still here. ``output``: the tokens that came behind those of the offer (int32).

    ``logprobs``: of all of its output, ``input_logprobs`` of its prompt, where they were asked for.
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
    """It goes on here, where ``key`` reads the rest of its answer (HTTP, ``port``)."""

    epoch: Epoch
    handover: HandoverId
    key: Key
    port: Annotated[int, Meta(ge=1, le=65535)]


class MoveRefused(Message):
    """It can't go on here: either way, and the last word."""

    epoch: Epoch
    handover: HandoverId
    reason: Reason


MoveMessage = MoveOffer | MoveReady | MoveCommit | MoveTaken | MoveRefused


class ReqMoved(Message):
    """Scheduler → detokenizer → HTTP: the rest of the request's answer is read at ``host`` and ``port``, of instance
    ``epoch``, by ``key``.
    """

    rid: str
    epoch: str
    host: str
    port: int
    key: str


class ReqArrived(Message):
    """Scheduler → detokenizer → HTTP: a moved request goes on here; who has ``key`` may read its answer.

    Its output follows, from the first token on; ``output_tokens`` of it, which come first, are not this instance's.
    """

    rid: str
    key: str
    arrival: float
    output_tokens: int


class MigrateReq(Message):
    """HTTP → scheduler: move a request to the instance behind this bootstrap address."""

    id: int
    rid: str
    host: str
    port: int


class MigrateResult(Message):
    """Whether it was, and why not. ``paused_ms``: how long it stood still here."""

    id: int
    moved: bool
    message: str = ""
    paused_ms: float = 0.0


def problem_of(running: RunningRequest, vocab_size: int) -> str | None:
    """What a peer's description of a request can't mean, None for a good one."""
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
        return "the logprobs that it wants are none"
    return _sampling_problem(req.sampling, req.stop_ids, vocab_size)


def tokens_problem(name: str, data: bytes, vocab_size: int) -> str | None:
    """What is wrong with token ids (int32), None for nothing."""
    if len(data) % 4:
        return f"its {name} is not int32"
    tokens = unpack_i32(data)
    if len(tokens) and not (tokens.min() >= 0 and tokens.max() < vocab_size):
        return f"its {name} has tokens that are none"
    return None


def _sampling_problem(p: SamplingParams, stop_ids: tuple[int, ...], vocab_size: int) -> str | None:
    ids = [*stop_ids, *p.stop_token_ids, *p.logit_bias]
    if len(ids) > MAX_IDS or not all(0 <= i < vocab_size for i in ids):
        return "its stop tokens or biases are of tokens that are none"
    if len(p.stop) > MAX_STOPS or any(len(string) > MAX_STOP_CHARS for string in p.stop):
        return "its stop strings are too many or too long"
    if not (0 <= p.seed < 1 << 63 and 1 <= p.max_new_tokens <= MAX_TOKENS and 0 <= p.min_new_tokens <= MAX_TOKENS):
        return "its seed or token limits are out of range"
    if not (-1 <= p.top_k <= MAX_TOKENS and 0 <= p.top_p <= 1 and 0 <= p.min_p <= 1):
        return "its top_p, top_k or min_p is out of range"
    if not 0 <= p.temperature <= MAX_TEMPERATURE:
        return "its temperature is out of range"
    # What clients may ask for, and no more: logits would become infinite, as if the model were broken.
    penalties = (p.frequency_penalty, p.presence_penalty)
    if not all(-MAX_PENALTY <= penalty <= MAX_PENALTY for penalty in penalties):
        return "its penalties are out of range"
    if not MIN_REPETITION_PENALTY <= p.repetition_penalty <= MAX_PENALTY:
        return "its repetition penalty is out of range"
    if not all(-MAX_BIAS <= bias <= MAX_BIAS for bias in p.logit_bias.values()):
        return "its biases are out of range"
    return None
