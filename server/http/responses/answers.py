"""Answers of the Responses API, for the OpenAPI page and for tests, which check every answer against them.

The writers make answers as plain objects, for speed: no model is made while serving.
"""

from __future__ import annotations

from typing import Any, Literal

from ..answers import AnswerBody

Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(AnswerBody):
    """A text for the user."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class ReasoningText(AnswerBody):
    """A text that the model wrote for itself."""

    type: Literal["reasoning_text"]
    text: str


class OutputMessage(AnswerBody):
    """An item of type "message"."""

    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(AnswerBody):
    """An item of type "reasoning"."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[Any]
    content: list[ReasoningText]
    encrypted_content: str | None = None


class FunctionCall(AnswerBody):
    """An item of type "function_call". ``arguments``: a JSON object, as text."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | ReasoningItem | FunctionCall


class InputTokensDetails(AnswerBody):
    """What of the input was cached."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(AnswerBody):
    """Tokens of the output by purpose."""

    reasoning_tokens: int


class ResponsesUsage(AnswerBody):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(AnswerBody):
    """``error`` of a response that failed."""

    code: str
    message: str


class IncompleteDetails(AnswerBody):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseFinish(AnswerBody):
    """How a response ended where OpenAI has no word for it."""

    type: Literal["abort", "timeout", "declined"]
    message: str


class ResponseAnswer(AnswerBody):
    """``POST /v1/responses``."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    background: Literal[False]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    safety_identifier: str | None
    reasoning: dict[str, Any]
    service_tier: Literal["default"]
    store: bool
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: Literal[0]
    truncation: Literal["disabled"]
    usage: ResponsesUsage | None
    user: str | None
    pdserve_finish: ResponseFinish | None = None


class ResponseEvent(AnswerBody):
    """An event of a streamed ``POST /v1/responses``. Its type says which fields it has."""

    type: str
    sequence_number: int
    response: ResponseAnswer | None = None
    item: OutputItem | None = None
    item_id: str | None = None
    output_index: int | None = None
    content_index: int | None = None
    part: OutputText | ReasoningText | None = None
    delta: str | None = None
    text: str | None = None
    logprobs: list[Any] | None = None
    name: str | None = None
    arguments: str | None = None
