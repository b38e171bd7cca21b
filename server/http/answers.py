"""What the endpoints answer, for the OpenAPI page and for tests, which hold every answer against it.

Answers are written as plain objects, for speed: nothing of this runs while serving.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, RootModel


class Answer(BaseModel):
    """Base of all: no field that is not declared, and no other type than the one that is."""

    model_config = ConfigDict(strict=True, extra="forbid")


class ErrorDetail(Answer):
    """See docs/http-api.md."""

    message: str
    type: str
    param: str | None
    code: str | None
    status: int


class ErrorAnswer(Answer):
    """Any status from 400 on."""

    error: ErrorDetail


# --- /generate ---


class FinishReasonAnswer(Answer):
    """Why an answer ended."""

    type: Literal["stop", "length", "abort", "timeout", "declined"]
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None


class TimelineAnswer(Answer):
    """Milliseconds since the request came to the decode instance."""

    bootstrap: float
    allocate: float
    queue: float
    prefill: float
    first_byte: float
    last_byte: float
    verify: float
    first_step: float


class PhaseAnswer(Answer):
    """Milliseconds that a request spent in a phase, and where: the instance and its process."""

    phase: Literal["tokenize", "queue", "prefill", "transfer", "decode", "reply"]
    at: Literal["unified", "prefill", "decode"]
    process: Literal["tokenizer", "scheduler", "worker", "detokenizer"]
    ms: float


class TimingAnswer(Answer):
    """Milliseconds, and bytes for the hand-over. The phases add up to ``total_ms``.

    ``detokenize_ms`` is time of a process beside the others. ``push_ms``: of a prefill's leg. ``timeline``: of a
    request that was handed over.
    """

    total_ms: float
    first_token_ms: float
    tokenize_ms: float
    queue_ms: float
    prefill_ms: float
    transfer_ms: float
    transfer_bytes: int
    decode_ms: float
    reply_ms: float
    detokenize_ms: float
    push_ms: float | None = None
    phases: list[PhaseAnswer]
    timeline: TimelineAnswer | None = None


ScoredToken = tuple[float | None, int, str | None]


class TokensByTier(Answer):
    """Where KV was found: the KV pool, host memory, a store."""

    device: int
    host: int
    storage: int


class CachedTokensDetails(TokensByTier):
    """Of cached tokens, where there are tiers. ``decode``: what a decode had itself of a handed over prompt."""

    decode: TokensByTier | None = None


class MetaInfo(Answer):
    """What is known of one answer besides its text."""

    id: str
    finish_reason: FinishReasonAnswer | None
    prompt_tokens: int | None
    completion_tokens: int
    cached_tokens: int | None
    cached_tokens_details: CachedTokensDetails | None = None
    e2e_latency: float | None = None
    retractions: int | None = None
    timing: TimingAnswer | None = None
    prompt_token_ids: list[int] | None = None
    input_token_logprobs: list[ScoredToken] | None = None
    output_token_logprobs: list[ScoredToken] | None = None
    input_top_logprobs: list[list[ScoredToken] | None] | None = None
    output_top_logprobs: list[list[ScoredToken] | None] | None = None


class Generated(Answer):
    """One answer, or one event of a stream, which has ``index`` where the body asked for several answers."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | None = None


class GenerateAnswer(RootModel[Generated | list[Generated]]):
    """A list where the body held a list of prompts, or asked for several answers."""


# --- OpenAI ---


class PromptTokensDetails(Answer):
    """What of the prompt was cached."""

    cached_tokens: int


class Usage(Answer):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


FinishName = Literal["stop", "length", "tool_calls", "content_filter"]
"""OpenAI's, all of them."""


class PdserveFinish(Answer):
    """How an answer ended where OpenAI has no word for it; ``finish_reason`` is "length" then."""

    type: Literal["abort", "timeout", "declined"]
    message: str


class Envelope(Answer):
    """The fields around choices."""

    id: str
    created: int
    model: str
    prompt_token_ids: list[int] | None = None
    timing: TimingAnswer | None = None


class CompletionLogprobs(Answer):
    """One entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    """One text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishName | None
    matched_stop: int | str | None = None
    pdserve_finish: PdserveFinish | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionAnswer(Envelope):
    """``POST /v1/completions``, and each event of its stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TokenLogprobAnswer(Answer):
    """An alternative."""

    token: str
    logprob: float | None
    bytes: list[int]


class ChatTokenLogprob(TokenLogprobAnswer):
    """A token and its alternatives."""

    top_logprobs: list[TokenLogprobAnswer]


class ChatLogprobs(Answer):
    """One entry a token."""

    content: list[ChatTokenLogprob]


class ChatMessageAnswer(Answer):
    """The assistant's turn."""

    role: Literal["assistant"]
    content: str


class ChatChoice(Answer):
    """One turn."""

    index: int
    message: ChatMessageAnswer
    logprobs: ChatLogprobs | None
    finish_reason: FinishName
    matched_stop: int | str | None
    pdserve_finish: PdserveFinish | None = None
    token_ids: list[int] | None = None


class ChatAnswer(Envelope):
    """``POST /v1/chat/completions``."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(Answer):
    """What is new of a turn."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(Answer):
    """What is new of one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishName | None
    matched_stop: int | str | None = None
    pdserve_finish: PdserveFinish | None = None
    token_ids: list[int] | None = None


class ChatChunk(Envelope):
    """An event of a streamed ``POST /v1/chat/completions``."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


# --- the model, and the instance ---


class ModelCard(Answer):
    """One name of the model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(Answer):
    """``GET /v1/models``."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokens(Answer):
    """``POST /tokenize``: lists of everything for a list of texts."""

    count: int | list[int]
    max_model_len: int
    tokens: list[int] | list[list[int]]
    token_strs: list[str] | list[list[str]] | None = None


class Text(Answer):
    """``POST /detokenize``: the same text twice, or the same list."""

    prompt: str | list[str]
    text: str | list[str]


class Ready(Answer):
    """It can serve. ``warning``: what somebody should look after nonetheless. The rest says which instance it is."""

    status: Literal["ready"]
    epoch: str | None = None
    role: Literal["unified", "prefill", "decode"] | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    warning: str | None = None


class Alive(Answer):
    """The HTTP process answers."""

    status: Literal["alive"]


class ModelInfo(Answer):
    """``GET /model_info``."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    is_generation: bool
    disaggregation_mode: str


class MetricsText(RootModel[str]):
    """``GET /metrics``: the text exposition format; docs/metrics.md has what is in it."""


class Told(Answer):
    """What one instance answered to a router that asked all of them."""

    url: str
    status: int
    answer: Any


class Aborted(Answer):
    """``POST /abort_request``: how many were running, and how many of them were prefills' legs of requests that other
    instances answer. A router counts answers alone, and also says what each instance answered."""

    aborted: int
    legs: int = 0
    instances: list[Told] = []


class Migrated(Answer):
    """``POST /migrate``: how many answers go on there, and for how long each stood still."""

    moved: int
    paused_ms: list[float]


class Draining(Answer):
    """``POST /drain``: how many requests are left."""

    draining: int


class RoleChanged(Answer):
    """``POST /role``."""

    role: str
    before: str


class MemoryReleased(Answer):
    """``POST /release_memory_occupation``: what is not there now, and how much less is used."""

    released: list[Literal["kv_cache", "weights"]]
    freed_bytes: int
    seconds: float


class MemoryResumed(Answer):
    """``POST /resume_memory_occupation``: what is still not there, and how much more is used."""

    released: list[Literal["kv_cache", "weights"]]
    taken_bytes: int
    seconds: float


class PoolResized(Answer):
    """``POST /kv/resize``: tokens of the pool now, and before; and how much less the worker has."""

    max_total_tokens: int
    before: int
    freed_bytes: int


class HashedLayer(Answer):
    """Of one layer, a hash of each page's ``K`` and ``V``; of latent attention ``latent``, of labelled keys ``labels``
    beside them. null: the page is not there.
    """

    layer: int
    K: list[str | None] = []
    V: list[str | None] = []
    latent: list[str | None] = []
    labels: list[str | None] = []


class KVHashesAnswer(Answer):
    """``POST /kv/hashes``: what is cached of the prompt, whole pages. ``order``: in which the elements were read."""

    tokens: int
    cached_tokens: int
    page_size: int
    order: Literal["tokens", "blocks"]
    extra_key: str
    layers: list[HashedLayer]


class ProfileStarted(Answer):
    """``POST /start_profile``: ``files`` will be there after ``num_steps`` steps, or ``seconds``, or a stop."""

    folder: str
    files: list[str]
    activities: list[Literal["CPU", "GPU"]]
    num_steps: int
    seconds: float


class ProfileStopped(Answer):
    """``POST /stop_profile``: the files of the profile that ended now or was the last, and their size in all."""

    folder: str
    files: list[str]
    bytes: int
    activities: list[Literal["CPU", "GPU"]]
    steps: int
    seconds: float
    ended_by: Literal["num_steps", "time limit", "request"]


class Flushed(Answer):
    """``POST /flush_cache``; a router also says what each instance answered."""

    success: Literal[True]
    flushed: int
    instances: list[Told] = []


class Transfer(Answer):
    """A hand-over that is open. ``peer``: the other instance's epoch. ``instance``: whose it is, from a router."""

    direction: Literal["sending", "receiving", "moving", "arriving"]
    room: int
    state: str
    rid: str | None
    peer: str | None
    seconds: float
    prompt_tokens: int | None
    reason: str | None
    instance: str | None = None


class TransfersAnswer(Answer):
    """``GET /transfers``."""

    open: int
    transfers: list[Transfer]


class ServerInfoAnswer(RootModel[dict[str, Any]]):
    """``GET /server_info``: docs/http-api.md has its fields."""
