"""Answers of Anthropic's API, for the OpenAPI page and for tests, which check every answer against them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, RootModel

from ..answers import AnswerBody, PdserveFinish

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlock(AnswerBody):
    """Text for the user."""

    type: Literal["text"]
    text: str


class ThinkingBlock(AnswerBody):
    """Reasoning. ``signature`` proves nothing here; it only tells blocks apart."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class DirectCaller(AnswerBody):
    """The caller of a tool: the model itself."""

    type: Literal["direct"]


class ToolUseBlock(AnswerBody):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: DirectCaller


ContentBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Discriminator("type")]


class MessageTokensDetails(AnswerBody):
    """Output tokens by purpose."""

    thinking_tokens: int


class MessageUsage(AnswerBody):
    """Token counts. The prompt has as many as the three ``input_tokens`` fields together."""

    input_tokens: int
    """Prompt tokens that were not cached."""
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    """Prompt tokens that were cached."""
    output_tokens: int
    output_tokens_details: MessageTokensDetails | None = None


class MessageAnswer(AnswerBody):
    """``POST /v1/messages``. ``stop_reason`` is null at the beginning of a stream."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    pdserve_finish: PdserveFinish | None = None
    usage: MessageUsage


class MessageStart(AnswerBody):
    """The first event: the message without content."""

    type: Literal["message_start"]
    message: MessageAnswer


class MessagePing(AnswerBody):
    """An event that adds nothing to the message. ``output_tokens``: tokens so far, of a part that is not complete."""

    type: Literal["ping"]
    output_tokens: int | None = None


class ContentBlockStart(AnswerBody):
    """A block begins, empty."""

    type: Literal["content_block_start"]
    index: int
    content_block: ContentBlock


class TextAddition(AnswerBody):
    """More text."""

    type: Literal["text_delta"]
    text: str


class ThinkingAddition(AnswerBody):
    """More reasoning."""

    type: Literal["thinking_delta"]
    thinking: str


class SignatureAddition(AnswerBody):
    """The signature at the end of reasoning."""

    type: Literal["signature_delta"]
    signature: str


class InputAddition(AnswerBody):
    """Arguments of a call, as JSON text."""

    type: Literal["input_json_delta"]
    partial_json: str


class ContentBlockDelta(AnswerBody):
    """More of the open block."""

    type: Literal["content_block_delta"]
    index: int
    delta: Annotated[TextAddition | ThinkingAddition | SignatureAddition | InputAddition, Discriminator("type")]


class ContentBlockStop(AnswerBody):
    """The open block is complete."""

    type: Literal["content_block_stop"]
    index: int


class MessageEnd(AnswerBody):
    """How the message ended."""

    stop_reason: StopReason
    stop_sequence: str | None
    pdserve_finish: PdserveFinish | None = None


class MessageDelta(AnswerBody):
    """The event after the last block, with the token counts of the whole answer."""

    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessageUsage


class MessageStop(AnswerBody):
    """The last event."""

    type: Literal["message_stop"]


class MessageEvent(
    RootModel[
        Annotated[
            MessageStart
            | MessagePing
            | ContentBlockStart
            | ContentBlockDelta
            | ContentBlockStop
            | MessageDelta
            | MessageStop,
            Discriminator("type"),
        ]
    ]
):
    """An event of a streamed ``POST /v1/messages``. The SSE event has the name of its ``type``."""


class TokenCount(AnswerBody):
    """``POST /v1/messages/count_tokens``."""

    input_tokens: int


class AnthropicErrorDetails(AnswerBody):
    """More about the refusal of ``thread``, for Anthropic's package."""

    error_code: str
    unsupported: list[str]


class AnthropicErrorDetail(AnswerBody):
    """An error. ``kind`` is pdserve's type of it, the others are as in all errors."""

    type: str
    message: str
    param: str | None
    code: str | None
    status: int
    kind: str | None
    details: AnthropicErrorDetails | None = None


class AnthropicErrorAnswer(AnswerBody):
    """Any status from 400 on."""

    type: Literal["error"]
    error: AnthropicErrorDetail
