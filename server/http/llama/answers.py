"""Answers of ``POST /completion``, for the OpenAPI page and for tests, which check every answer against them.

``writer.py`` makes answers as plain objects, for speed: no model is made while serving.
"""

from __future__ import annotations

from typing import Literal

from pydantic import RootModel

from ..answers import AnswerBody, PdserveFinish


class LlamaErrorDetail(AnswerBody):
    """A failed request. ``code``: the status, too. ``kind`` and ``reason``: pdserve's own type and code."""

    code: int
    message: str
    type: str
    param: str | None
    status: int
    kind: str | None
    reason: str | None


class LlamaError(AnswerBody):
    """Any status from 400 on."""

    error: LlamaErrorDetail


class TokenProbability(AnswerBody):
    """A token, and the natural logarithm of its probability."""

    id: int
    token: str
    bytes: list[int]
    logprob: float | None


class CompletionProbability(TokenProbability):
    """A token of the output, and the most probable ones at its place."""

    top_logprobs: list[TokenProbability]


class CompletionTimings(AnswerBody):
    """Tokens and milliseconds. ``prompt_n`` leaves out the cached tokens, which are ``cache_n``."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class CompletionSettings(AnswerBody):
    """How tokens are chosen. ``n_ctx``: maximum tokens of prompt and output together."""

    n_predict: int
    n_ctx: int
    model: str
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    stop: list[str]
    ignore_eos: bool
    logit_bias: list[tuple[int, float]]
    n_probs: int
    grammar: str
    stream: bool


class LlamaCompleted(AnswerBody):
    """One answer. ``tokens_evaluated``: tokens of the prompt, cached ones included."""

    index: int
    content: str
    tokens: list[int]
    stop: Literal[True]
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    generation_settings: CompletionSettings
    prompt: str
    truncated: bool
    stop_type: Literal["eos", "word", "limit"]
    stopping_word: str
    tokens_cached: int
    timings: CompletionTimings
    completion_probabilities: list[CompletionProbability] | None = None
    pdserve_finish: PdserveFinish | None = None


class LlamaCompletion(RootModel[LlamaCompleted | list[LlamaCompleted]]):
    """``POST /completion``: a list where the body asked for several answers."""


class LlamaPiece(AnswerBody):
    """What is new of an answer. ``tokens_predicted``: tokens so far."""

    index: int
    content: str
    tokens: list[int]
    stop: Literal[False]
    tokens_predicted: int
    tokens_evaluated: int
    completion_probabilities: list[CompletionProbability] | None = None


class LlamaCompletionEvent(RootModel[LlamaPiece | LlamaCompleted]):
    """An event of a streamed ``POST /completion``. The last one of each answer has no content, and all facts."""
