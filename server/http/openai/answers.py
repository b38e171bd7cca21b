"""Answers of OpenAI's API, for the OpenAPI page and for tests, which check every answer against them.

The renderers write answers as plain objects, for speed: no model is made while serving.
"""

from __future__ import annotations

from typing import Literal

from ..answers import AnswerBody, PdserveFinish
from ..native.answers import TimingAnswer


class PromptTokensDetails(AnswerBody):
    """What of the prompt was cached."""

    cached_tokens: int


class CompletionTokensDetails(AnswerBody):
    """Tokens of the answer by purpose."""

    reasoning_tokens: int


class Usage(AnswerBody):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


FinishName = Literal["stop", "length", "tool_calls", "content_filter"]
"""OpenAI's, all of them."""


class OpenAIAnswer(AnswerBody):
    """The fields around choices."""

    id: str
    created: int
    model: str
    prompt_token_ids: list[int] | None = None
    timing: TimingAnswer | None = None


class CompletionLogprobs(AnswerBody):
    """One entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(AnswerBody):
    """One text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishName | None
    matched_stop: int | str | None = None
    pdserve_finish: PdserveFinish | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionAnswer(OpenAIAnswer):
    """``POST /v1/completions``, and each event of its stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TokenLogprobAnswer(AnswerBody):
    """An alternative."""

    token: str
    logprob: float | None
    bytes: list[int]


class ChatTokenLogprob(TokenLogprobAnswer):
    """A token and its alternatives."""

    top_logprobs: list[TokenLogprobAnswer]


class ChatLogprobs(AnswerBody):
    """One entry a token."""

    content: list[ChatTokenLogprob]


class CalledFunctionAnswer(AnswerBody):
    """A function that the model calls. ``arguments``: a JSON object, as text."""

    name: str
    arguments: str


class ToolCallAnswer(AnswerBody):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunctionAnswer


class FunctionDelta(AnswerBody):
    """What is new of a function that the model calls. Pieces of ``arguments`` add up to a JSON object."""

    name: str | None = None
    arguments: str


class ToolCallDelta(AnswerBody):
    """What is new of a call of a tool. Only its first event has ``id``, ``type`` and the function's name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatMessageAnswer(AnswerBody):
    """The assistant's turn. ``content`` is null if there are only tool calls."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallAnswer] | None = None


class ChatChoice(AnswerBody):
    """One turn."""

    index: int
    message: ChatMessageAnswer
    logprobs: ChatLogprobs | None
    finish_reason: FinishName
    matched_stop: int | str | None
    pdserve_finish: PdserveFinish | None = None
    token_ids: list[int] | None = None


class ChatAnswer(OpenAIAnswer):
    """``POST /v1/chat/completions``."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(AnswerBody):
    """What is new of a turn."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(AnswerBody):
    """What is new of one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishName | None
    matched_stop: int | str | None = None
    pdserve_finish: PdserveFinish | None = None
    token_ids: list[int] | None = None


class ChatChunk(OpenAIAnswer):
    """An event of a streamed ``POST /v1/chat/completions``."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
