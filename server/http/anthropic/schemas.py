"""What ``POST /v1/messages`` and ``POST /v1/messages/count_tokens`` take: the bodies of Anthropic's Messages API."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from ....messages.decode import shown
from ....messages.grammar import Grammar
from ....messages.sampling import MAX_STOPS
from ..bodies.fields import Body, FieldError, check_small
from ..bodies.message_fields import MAX_MESSAGES, TextOrParts
from ..bodies.request_fields import Count, RequestFields, SamplingFields, StopString, Temperature, TopK, TopP
from ..bodies.structure import grammars_of, one_grammar
from ..bodies.tool_fields import MAX_TOOL_CALLS, ListedTool, ToolList, ToolName, ToolType, Values, served_tools
from ..bodies.typed import check_required
from ..bodies.unserved import ANYTHING, IGNORED, Unserved, neutral
from .blocks import NEEDS, BlockBody, TextBlockBody, check_block, texts_of

MAX_CHARACTERS = 1 << 20
"""Maximum number of characters in a prompt that is only counted, as for ``/tokenize``."""
CUSTOM = "custom"
"""Type of the tools that clients run. A tool without a type is one as well."""
MAX_NAME = 64
"""Maximum number of characters of a tool's name that are repeated."""
TOOL_SEARCH = "tool_search_tool"
"""Beginning of the types of Anthropic's own search for deferred tools."""

PROMPT: Unserved = {
    # How long a prefix stays cached is decided here by use alone.
    "cache_control": ANYTHING,
    # Headers of the API, which some gateways put into the body.
    **dict.fromkeys(("anthropic_version", "anthropic_beta", "betas"), ANYTHING),
    **dict.fromkeys(("context_management", "mcp_servers", "speed"), IGNORED),
}
MESSAGES: Unserved = {
    **PROMPT,
    **dict.fromkeys(("service_tier", "inference_geo", "user_profile_id", "billing_policy", "diagnostics"), IGNORED),
    # What happens after a refusal, which no model here answers with.
    **dict.fromkeys(("fallbacks", "fallback_credit_token"), IGNORED),
    **neutral(names="container compaction"),
}
TOOL: Unserved = {
    # When arguments are sent: an option of the server and the format of the model say it.
    **dict.fromkeys(("cache_control", "eager_input_streaming"), ANYTHING),
    **dict.fromkeys(("strict", "allowed_callers", "input_examples"), IGNORED),
}


class TurnBody(Body):
    """One turn of a conversation. A turn of role "system" gives instructions from there on."""

    unserved: ClassVar[Unserved] = {"id": ANYTHING, "cache_control": ANYTHING}

    role: Literal["user", "assistant", "system"]
    content: TextOrParts[BlockBody]

    @model_validator(mode="after")
    def _check_blocks(self) -> TurnBody:
        blocks = self.blocks
        for i, block in enumerate(blocks):
            check_block(block, NEEDS[self.role], f"content[{i}].")
        if sum(block.type == "tool_use" for block in blocks) > MAX_TOOL_CALLS:
            raise FieldError("content", f"holds more than {MAX_TOOL_CALLS} blocks of type tool_use")
        return self

    @property
    def text(self) -> str | None:
        """The content if that is one text, else None. Thousands of texts cost little if no blocks are made of them."""
        return self.content if isinstance(self.content, str) else None

    @property
    def blocks(self) -> list[BlockBody]:
        """Blocks of the turn; none if it is one text."""
        return self.content if isinstance(self.content, list) else []

    @property
    def characters(self) -> int:
        """Length of all texts of the turn, in characters."""
        return len(self.text or "") + sum(block.characters for block in self.blocks)


class MessagesToolBody(ListedTool):
    """A tool that the model may call. Those of other types are Anthropic's own: run by its servers, or known to its
    models.
    """

    unserved: ClassVar[Unserved] = TOOL
    served_type = CUSTOM
    required = ("name", "input_schema")

    type: ToolType = CUSTOM
    name: ToolName | None = None
    description: str | None = None
    input_schema: Values | None = None
    """JSON schema of the arguments, an object."""
    defer_loading: bool = False
    """Whether the tool is left out until a block of the conversation names it."""

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates get it, which is OpenAI's shape."""
        given = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        function = {name: value for name, value in given.items() if value is not None}
        return {"type": "function", "function": function}


def _check_names(tools: list[MessagesToolBody]) -> list[MessagesToolBody]:
    names = set[str]()
    for name in (tool.name or "" for tool in served_tools(tools)):
        if name in names:
            raise ValueError(f'has two tools of the name "{shown(name, MAX_NAME)}"')
        names.add(name)
    return tools


class MessagesToolChoice(Body):
    """Whether the model may or must call a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    """Tool to call if the type is "tool"."""
    disable_parallel_tool_use: bool = False
    """Whether an answer has one call at most; further ones are left out."""

    @model_validator(mode="after")
    def _check_name(self) -> MessagesToolChoice:
        check_required(self, self.type, ("name",) if self.type == "tool" else ())
        if self.type != "tool" and self.name is not None:
            raise FieldError("name", 'belongs to the type "tool"')
        return self


class ThinkingBody(Body):
    """``thinking``: whether the model reasons before it answers."""

    unserved: ClassVar[Unserved] = {"budget_tokens": IGNORED}

    type: Literal["enabled", "disabled", "adaptive"]
    """Only "disabled" differs: how much a model reasons is its own choice."""
    display: Annotated[str, Field(max_length=64)] = "summarized"
    """Only "omitted" differs: blocks of thinking have no text then."""


class JsonFormatBody(Body):
    """A JSON schema that the answer matches."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfigBody(Body):
    """``output_config``. ``effort`` goes to the model's template as ``reasoning_effort``."""

    unserved: ClassVar[Unserved] = {"task_budget": IGNORED}

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormatBody | None = None


class MetadataBody(Body):
    """``metadata``. ``user_id`` is the user with --fair-scheduling."""

    user_id: str | None = None


class MessagesPromptBody(Body):
    """The fields that make the prompt."""

    unserved: ClassVar[Unserved] = PROMPT

    model: str | None = None
    messages: Annotated[list[TurnBody], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    system: TextOrParts[TextBlockBody] | None = None
    tools: Annotated[ToolList[MessagesToolBody], AfterValidator(_check_names)] = Field(default_factory=list)
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingBody | None = None
    output_config: OutputConfigBody | None = None
    output_format: JsonFormatBody | None = None
    """Older name of ``output_config.format``."""

    @model_validator(mode="after")
    def _check_pairs(self) -> MessagesPromptBody:
        grammar = self.grammar()
        if self.tool_choice is not None and self.tool_choice.type in ("any", "tool") and not self.custom_tools:
            raise FieldError("tool_choice", 'needs tools of type "custom"')
        # Not in the other order: all blocks are looked at here, and not later on the event loop.
        if self.callable_tools and grammar is not None:
            raise FieldError(grammar.field, 'can\'t go with tools, unless tool_choice is "none"')
        return self

    # Computed once: a conversation may have thousands of blocks.
    @cached_property
    def custom_tools(self) -> list[MessagesToolBody]:
        """Tools that are not ignored, and that the conversation has not removed, or has named if they are deferred.

        Without Anthropic's search for tools, which is ignored, none but the client can find deferred tools.
        """
        is_found = any(tool.type.startswith(TOOL_SEARCH) for tool in self.tools)
        changes: dict[str, bool] = {}
        for turn in self.messages if self.tools else ():
            for block in turn.blocks:
                changes |= block.tool_changes
        return [
            tool
            for tool in served_tools(self.tools)
            if changes.get(tool.name or "", is_found or not tool.defer_loading)
        ]

    @property
    def callable_tools(self) -> list[MessagesToolBody]:
        """Tools that the answer may call: none if ``tool_choice`` is "none"."""
        return [] if self.tool_choice is not None and self.tool_choice.type == "none" else self.custom_tools

    @cached_property
    def characters(self) -> int:
        """Length of all texts that the prompt is made of, in characters."""
        system = sum(map(len, texts_of(self.system or ())))
        return system + sum(turn.characters for turn in self.messages) + sum(len(repr(tool)) for tool in self.tools)

    def grammar(self) -> Grammar | None:
        """Return what the output must match; None: anything. Raises ``FieldError`` if two fields are given."""
        formats = {"output_format": self.output_format}
        if self.output_config is not None:
            formats["output_config.format"] = self.output_config.format
        # A schema that allows anything still asks for JSON.
        given = {name: ("json_schema", one.schema_ or "{}") for name, one in formats.items() if one is not None}
        return one_grammar(grammars_of(given))


class MessagesBody(MessagesPromptBody, RequestFields):
    """``POST /v1/messages``."""

    unserved: ClassVar[Unserved] = MESSAGES

    max_tokens: Count
    """0 computes the prompt, so that its prefix is cached, and answers nothing."""
    stream: bool = False
    stop_sequences: Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_STOPS)] = Field(
        default_factory=list
    )
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = -1
    metadata: MetadataBody | None = None
    thread: Annotated[dict[str, Any], AfterValidator(check_small)] | None = None
    """Refused: no conversations are kept here. Anthropic's package then sends all of the conversation."""

    def sampling(self) -> SamplingFields:
        """Return the sampling fields that the client gave; the model's defaults take the place of the others."""
        names = ("temperature", "top_p", "top_k")
        given = {name: getattr(self, name) for name in names if name in self.model_fields_set}
        return SamplingFields(stop=self.stop_sequences, **given)

    def with_user(self) -> MessagesBody:
        """Return the body with the user that its ``metadata`` names, unless it has a ``user``."""
        if self.user is not None or self.metadata is None:
            return self
        return self.model_copy(update={"user": self.metadata.user_id})


class CountTokensBody(MessagesPromptBody):
    """``POST /v1/messages/count_tokens``."""

    @model_validator(mode="after")
    def _check_size(self) -> CountTokensBody:
        if self.characters > MAX_CHARACTERS:
            raise FieldError("messages", f"holds {self.characters} characters, the limit is {MAX_CHARACTERS}")
        return self
