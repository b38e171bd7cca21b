"""What ``POST /v1/completions`` and ``POST /v1/chat/completions`` take: OpenAI's bodies and the usual extensions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from ....messages.grammar import Grammar
from ....runtime.web.body import MAX_PROMPTS
from ..bodies.fields import (
    INT32_MAX,
    INTEGRAL,
    TAG,
    Body,
    FieldError,
    PromptIdLists,
    PromptIds,
    TemplateArgs,
)
from ..bodies.message_fields import MAX_MESSAGES, TextOrParts
from ..bodies.request_fields import Count, RequestFields, SamplingFields, Seed
from ..bodies.unserved import ANYTHING, IGNORED, STRUCTURE, Unserved, neutral
from .structure import OpenAIStructure
from .tools import ToolBodies, ToolCallBodies, ToolChoice

MAX_OPENAI_LOGPROBS = 20
TEXT, TEXTS, IDS, ID_LISTS = TAG + "text", TAG + "texts", TAG + "ids", TAG + "id_lists"
DEFAULT_COMPLETION_TOKENS = 16

MaxTokens = Annotated[int, Field(ge=1, le=INT32_MAX), INTEGRAL]


_OPENAI_COMMON: Unserved = {
    **STRUCTURE,
    **neutral(
        False,
        names="include_stop_str_in_output use_beam_search early_stopping return_hidden_states return_routed_experts "
        "return_cached_tokens_details return_meta_info",
    ),
    **neutral([], names="allowed_token_ids bad_words logits_processors"),
    **neutral({}, names="kv_transfer_params vllm_xargs session_params"),
    **neutral("", names="guided_whitespace_pattern"),
    "guided_decoding_backend": IGNORED,
    **neutral("", names="custom_logit_processor lora_path"),
    **neutral(names="truncate_prompt_tokens prompt_logprobs data_parallel_rank thinking_token_budget"),
    **neutral(1, names="length_penalty stream_interval"),
    **dict.fromkeys(("metadata", "safety_identifier", "request_id"), ANYTHING),
    **dict.fromkeys(("service_tier", "store", "prompt_cache_key", "prompt_cache_retention"), IGNORED),
}

COMPLETION: Unserved = {**_OPENAI_COMMON, **neutral("", names="suffix"), **neutral(names="prompt_embeds")}

CHAT: Unserved = {
    **_OPENAI_COMMON,
    **neutral([], names="functions documents"),
    **neutral({}, names="audio web_search_options reasoning mm_processor_kwargs"),
    **neutral("", names="chat_template"),
    **neutral(False, names="echo"),
    **neutral("none", "auto", names="function_call"),
    **neutral(["text"], names="modalities"),
    # Hints: how long the answer should be, and how soon it should come.
    **dict.fromkeys(("verbosity", "prediction"), IGNORED),
    **neutral(True, names="stream_reasoning"),
}

CHAT_MESSAGE: Unserved = {
    **neutral([], names="annotations"),
    **neutral("", names="refusal"),
    **neutral({}, names="function_call audio"),
    # lm-eval sends this in each message, as if it were a part of one.
    "type": ("text", "message"),
    "id": ANYTHING,
    "status": ANYTHING,
    "cache_control": IGNORED,
}

TEXT_PART: Unserved = {**neutral([], names="annotations"), "cache_control": IGNORED}

STREAM_OPTIONS: Unserved = {"include_obfuscation": ANYTHING, "chunk_include_usage": (False,)}


class StreamOptions(Body):
    """``stream_options``. ``continuous_usage_stats`` puts the usage so far in every chunk."""

    unserved: ClassVar[Unserved] = STREAM_OPTIONS

    include_usage: bool = False
    continuous_usage_stats: bool = False


class OpenAIBody(RequestFields, SamplingFields, OpenAIStructure):
    """What both OpenAI bodies share."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    seed: Seed | None = None
    min_tokens: Count = 0
    add_special_tokens: bool | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    """vLLM's word for ``extra_key``."""

    def grammars(self) -> dict[str, Grammar]:
        """Return the grammars that the body asks for, by field name.

        They include those of OpenAI's and vLLM's fields.
        """
        return super().grammars() | self.openai_grammars()

    @model_validator(mode="after")
    def _check_stream_options(self) -> OpenAIBody:
        if self.stream_options not in (None, StreamOptions()) and not self.stream:
            raise FieldError("stream_options", 'has a meaning only with "stream": true')
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

    unserved: ClassVar[Unserved] = COMPLETION

    prompt: Prompt
    max_tokens: Count = DEFAULT_COMPLETION_TOKENS
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_OPENAI_LOGPROBS), INTEGRAL] | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_false_logprobs(cls, raw: Any) -> Any:
        # The chat endpoint's word for none.
        if isinstance(raw, dict) and raw.get("logprobs") is False:
            return {**raw, "logprobs": None}
        return raw


class TextPart(Body):
    """One part of a message's content."""

    unserved: ClassVar[Unserved] = TEXT_PART

    type: Literal["text"]
    text: str


Content = TextOrParts[TextPart]


class ChatMessageBody(Body):
    """One turn of a conversation. ``name`` and ``reasoning_content`` are there for the model's template.

    ``reasoning`` is vLLM's name of ``reasoning_content``.

    ``prefix`` of an assistant's last message says that the answer continues it, as with ``continue_final_message``.
    DeepSeek and Mistral call it so, and aider sends it; Moonshot and Alibaba call it ``partial``.
    """

    unserved: ClassVar[Unserved] = CHAT_MESSAGE

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    """Missing from an assistant's turn that was all tool calls or thinking."""
    name: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: ToolCallBodies = Field(default_factory=list)
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    prefix: bool = False
    partial: bool = False

    @model_validator(mode="after")
    def _check_role(self) -> ChatMessageBody:
        if self.content is None and self.role != "assistant":
            raise FieldError("content", "is required")
        if self.tool_calls and self.role != "assistant":
            raise FieldError("tool_calls", 'belongs to a message of role "assistant"')
        if self.tool_call_id is not None and self.role != "tool":
            raise FieldError("tool_call_id", 'belongs to a message of role "tool"')
        for name in ("prefix", "partial"):
            if getattr(self, name) and self.role != "assistant":
                raise FieldError(name, 'belongs to a message of role "assistant"')
        return self

    @property
    def is_beginning(self) -> bool:
        """Whether the message is only the beginning of one, which the answer continues if it is the last."""
        return self.prefix or self.partial

    @property
    def characters(self) -> int:
        """Length of the content, the reasoning and the arguments of calls together, in characters."""
        thought = self.reasoning_content or self.reasoning or ""
        return (
            self._content_characters
            + len(thought)
            + sum(len(repr(call.function.arguments)) for call in self.tool_calls)
        )

    @property
    def _content_characters(self) -> int:
        if isinstance(self.content, list):
            return sum(len(part.text) for part in self.content)
        return len(self.content or "")


ChatMessages = Annotated[list[ChatMessageBody], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]


class ChatBody(OpenAIBody):
    """``POST /v1/chat/completions``."""

    unserved: ClassVar[Unserved] = CHAT

    messages: ChatMessages
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_OPENAI_LOGPROBS), INTEGRAL] = 0
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: TemplateArgs = Field(default_factory=dict)
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = None
    """Goes to the model's template, as ``chat_template_kwargs`` do."""
    tools: ToolBodies = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    """Whether one answer may have several calls; otherwise all but the first are left out."""
    separate_reasoning: bool = True
    """Whether reasoning is answered as ``reasoning_content``; otherwise it is part of the text."""
    include_reasoning: bool = True
    """Whether reasoning is answered at all."""

    @model_validator(mode="after")
    def _check_pairs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", 'needs "logprobs": true')
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise FieldError("max_tokens", "differs from max_completion_tokens; give only the latter")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise FieldError("tool_choice", "needs tools")
        if self.tools and self.tool_choice != "none" and (grammar := self.grammar()) is not None:
            raise FieldError(grammar.field, 'can\'t go with tools, unless tool_choice is "none"')
        if self.continue_final_message and self.add_generation_prompt:
            raise FieldError("continue_final_message", "can't go with add_generation_prompt; give one of the two")
        return self

    @property
    def token_limit(self) -> int | None:
        """Maximum number of tokens to generate; None: until the context is full."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
