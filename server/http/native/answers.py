"""Answers of ``POST /generate``, for the OpenAPI page and for tests, which check every answer against them.

``generate.py`` writes answers as plain objects, for speed: no model is made while serving.
"""

from __future__ import annotations

from typing import Literal

from pydantic import RootModel

from ..answers import AnswerBody


class FinishReasonAnswer(AnswerBody):
    """Why an answer ended."""

    type: Literal["stop", "length", "abort", "timeout", "declined"]
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None


class TimelineAnswer(AnswerBody):
    """Milliseconds since the request came to the decode instance."""

    bootstrap: float
    allocate: float
    queue: float
    prefill: float
    first_byte: float
    last_byte: float
    verify: float
    first_step: float


class PhaseAnswer(AnswerBody):
    """Milliseconds that a request spent in a phase, and where: the instance and its process."""

    phase: Literal["tokenize", "queue", "prefill", "transfer", "decode", "reply"]
    at: Literal["unified", "prefill", "decode"]
    process: Literal["tokenizer", "scheduler", "worker", "detokenizer"]
    ms: float


class TimingAnswer(AnswerBody):
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


class TokensByTier(AnswerBody):
    """Where KV was found: the KV pool, host memory, a store."""

    device: int
    host: int
    storage: int


class CachedTokensDetails(TokensByTier):
    """Cached prompt tokens by tier. ``decode``: what the decode had cached of a prompt that was handed over."""

    decode: TokensByTier | None = None


class MetaInfo(AnswerBody):
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


class Generated(AnswerBody):
    """One answer, or one event of a stream, which has ``index`` where the body asked for several answers."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | None = None


class GenerateAnswer(RootModel[Generated | list[Generated]]):
    """A list where the body held a list of prompts, or asked for several answers."""
