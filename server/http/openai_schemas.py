"""What ``POST /v1/completions`` and ``POST /v1/chat/completions`` take: OpenAI's bodies and the usual extensions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from . import unserved
from .errors import bad_request
from .fields import INT32_MAX, INT64_MAX, INT64_MIN, MANY, MAX_PROMPTS, ONE, TAG, Body, PromptIdLists, PromptIds
from .schemas import RequestFields, SamplingFields
from .unserved import Unserved

MAX_OPENAI_LOGPROBS = 20
MAX_PARTS = 4096
"""Of one message's content."""
TEXT, TEXTS, IDS, ID_LISTS = TAG + "text", TAG + "texts", TAG + "ids", TAG + "id_lists"
DEFAULT_COMPLETION_TOKENS = 16

MaxTokens = Annotated[int, Field(ge=0, le=INT32_MAX)]


class StreamOptions(Body):
    """``stream_options``. ``continuous_usage_stats`` puts the usage so far in every chunk."""

    path: ClassVar[str] = "stream_options"
    unserved: ClassVar[Unserved] = unserved.STREAM_OPTIONS

    include_usage: bool = False
    continuous_usage_stats: bool = False


class OpenAIBody(RequestFields, SamplingFields):
    """What both OpenAI bodies share."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    seed: Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0

    @model_validator(mode="after")
    def _check_stream_options(self) -> OpenAIBody:
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options", 'has a meaning only with "stream": true')
        return self


def _prompt_kind(value: Any) -> str:
    if not isinstance(value, list):
        return TEXT
    first = value[0] if value else ""
    return ID_LISTS if isinstance(first, list) else TEXTS if isinstance(first, str) else IDS


Prompt = Annotated[
    Annotated[str, Tag(TEXT)]
    | Annotated[list[str], Field(fail_fast=True, max_length=MAX_PROMPTS), Tag(TEXTS)]
    | Annotated[PromptIds, Tag(IDS)]
    | Annotated[PromptIdLists, Tag(ID_LISTS)],
    Discriminator(_prompt_kind),
]


class CompletionBody(OpenAIBody):
    """``POST /v1/completions``."""

    unserved: ClassVar[Unserved] = unserved.COMPLETION

    prompt: Prompt
    max_tokens: MaxTokens = DEFAULT_COMPLETION_TOKENS
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_OPENAI_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _check_echo(self) -> CompletionBody:
        if self.echo and self.logprobs is not None and self.stream:
            raise bad_request("echo", "with logprobs it can't be streamed; leave stream out")
        return self


class TextPart(Body):
    """One part of a message's content."""

    path: ClassVar[str] = "messages.content"

    type: Literal["text"]
    text: str


class Message(Body):
    """One turn of a conversation."""

    path: ClassVar[str] = "messages"
    unserved: ClassVar[Unserved] = unserved.CHAT_MESSAGE

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[str, Tag(ONE)] | Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_PARTS), Tag(MANY)],
        Discriminator(lambda value: MANY if isinstance(value, list) else ONE),
    ]

    @property
    def text(self) -> str:
        """The content as plain text, parts joined by newlines."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)


class ChatBody(OpenAIBody):
    """``POST /v1/chat/completions``."""

    unserved: ClassVar[Unserved] = unserved.CHAT

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=4096)]
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_OPENAI_LOGPROBS)] = 0

    @model_validator(mode="after")
    def _check_pairs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs", 'needs "logprobs": true')
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise bad_request("max_tokens", "differs from max_completion_tokens; give only the latter")
        return self

    @property
    def token_limit(self) -> int | None:
        """Most tokens to generate; None: until the context is full."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
