"""What ``POST /v1/responses`` takes: OpenAI's body, and sampling parameters beyond it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from ....messages.grammar import Grammar
from ..bodies.fields import INT32_MAX, INTEGRAL, MANY, ONE, Body, FieldError, TemplateArgs
from ..bodies.request_fields import Count, RequestFields, SamplingFields, Seed
from ..bodies.structure import ANY_OBJECT, grammars_of
from ..bodies.tool_fields import ListedTool, ToolList, ToolName, Values, served_tools
from ..bodies.typed import TypeName
from ..bodies.unserved import ANYTHING, IGNORED, STRUCTURE, Unserved, neutral
from .items import Input

MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
MAX_INCLUDES = 64
FUNCTION = "function"
ENCRYPTED_REASONING = "reasoning.encrypted_content"
OUTPUT_LOGPROBS = "message.output_text.logprobs"
Label = Annotated[str, Field(max_length=1024)]


class FunctionTool(ListedTool):
    """A tool. Only functions are served."""

    unserved: ClassVar[Unserved] = {"strict": IGNORED, "cache_control": ANYTHING, "defer_loading": ANYTHING}
    served_type = FUNCTION
    required = ("name",)

    name: ToolName | None = None
    description: str | None = None
    parameters: Values | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the function as chat templates get it, with only the fields that the client gave."""
        return {"type": FUNCTION, FUNCTION: self.model_dump(exclude_unset=True, exclude={"type"})}


class ForcedFunction(Body):
    """The function that the model has to call."""

    type: TypeName
    name: ToolName | None = None

    @model_validator(mode="after")
    def _check_type(self) -> ForcedFunction:
        if self.type != FUNCTION:
            raise FieldError("type", f'"{self.type}" is not served; give "function", or leave tool_choice out')
        if self.name is None:
            raise FieldError("name", "is required")
        return self


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(ONE)] | Annotated[ForcedFunction, Tag(MANY)],
    Discriminator(lambda value: ONE if isinstance(value, str) else MANY),
]


class TextFormat(Body):
    """``text.format``. ``name``, ``description`` and ``strict`` change nothing: a schema always holds."""

    unserved: ClassVar[Unserved] = dict.fromkeys(("description", "strict"), ANYTHING)

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Label = "response"
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")

    @model_validator(mode="after")
    def _check_schema(self) -> TextFormat:
        if self.type == "json_schema" and self.schema_ is None:
            raise FieldError("schema", 'is required if the type is "json_schema"')
        return self


class TextConfig(Body):
    """``text``."""

    # A hint of how long the answer should be.
    unserved: ClassVar[Unserved] = {"verbosity": IGNORED}

    format: TextFormat = Field(default_factory=TextFormat)


class ReasoningConfig(Body):
    """``reasoning``. There are no summaries, as reasoning is answered itself."""

    unserved: ClassVar[Unserved] = dict.fromkeys(("summary", "generate_summary", "context"), IGNORED)

    effort: Annotated[str, Field(max_length=64)] | None = None
    """Goes to the model's template, as ``chat_template_kwargs`` do."""


class ResponseStreamOptions(Body):
    """``stream_options``."""

    unserved: ClassVar[Unserved] = {"include_obfuscation": ANYTHING}


def _check_includes(includes: list[str]) -> list[str]:
    if OUTPUT_LOGPROBS in includes:
        raise ValueError(f'holds "{OUTPUT_LOGPROBS}", which is not served; /v1/chat/completions has log-probabilities')
    return includes


def _check_metadata(metadata: dict[str, str]) -> dict[str, str]:
    for name, value in metadata.items():
        if len(name) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            raise ValueError(
                f"holds a name longer than {MAX_METADATA_KEY} characters, or a value longer than {MAX_METADATA_VALUE}"
            )
    return metadata


RESPONSES: Unserved = {
    **STRUCTURE,
    **neutral(False, names="background"),
    **neutral(names="conversation prompt"),
    **neutral([], names="context_management"),
    **neutral(0, names="top_logprobs"),
    # A prompt that is too long is refused, which no client can take for truncation.
    **dict.fromkeys(("truncation", "service_tier", "prompt_cache_retention"), IGNORED),
    # Labels, and a limit on calls of tools that the server itself would run.
    **dict.fromkeys(("client_metadata", "max_tool_calls"), ANYTHING),
}


class ResponsesBody(RequestFields, SamplingFields):
    """``POST /v1/responses``."""

    unserved: ClassVar[Unserved] = RESPONSES

    model: str | None = None
    input: Input
    instructions: str | None = None
    """A system message before all others. It is not part of the conversation that ``previous_response_id`` goes on
    with."""
    previous_response_id: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    n: Annotated[int, Field(ge=1, le=1), INTEGRAL] = 1
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    store: bool = True
    kept_elsewhere: bool = False
    """Set by a router that keeps the response, and has put the conversation so far into ``input``."""
    max_output_tokens: Annotated[int, Field(ge=1, le=INT32_MAX), INTEGRAL] | None = None
    min_tokens: Count = 0
    seed: Seed | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    reasoning: ReasoningConfig = Field(default_factory=ReasoningConfig)
    text: TextConfig = Field(default_factory=TextConfig)
    tools: ToolList[FunctionTool] = Field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    """Whether one answer may have several calls; otherwise all but the first are left out."""
    include: Annotated[list[Label], Field(fail_fast=True, max_length=MAX_INCLUDES), AfterValidator(_check_includes)] = (
        Field(default_factory=list)
    )
    """``reasoning.encrypted_content`` adds that field. Other values are about tools of OpenAI's servers."""
    metadata: Annotated[dict[str, str], Field(max_length=MAX_METADATA), AfterValidator(_check_metadata)] = Field(
        default_factory=dict
    )
    prompt_cache_key: Label | None = None
    """Answered again; it has no effect."""
    safety_identifier: Label | None = None
    chat_template_kwargs: TemplateArgs = Field(default_factory=dict)

    def grammars(self) -> dict[str, Grammar]:
        """Return the grammars that the body asks for, by field name; ``text.format`` among them."""
        given = self.text.format
        if given.type == "json_schema":
            # A schema that allows anything still asks for JSON.
            source = given.schema_ or "{}"
        else:
            source = ANY_OBJECT if given.type == "json_object" else ""
        return super().grammars() | grammars_of({"text.format": ("json_schema", source)})

    @property
    def functions(self) -> Sequence[FunctionTool]:
        """The tools that the model may call, whatever ``tool_choice`` says."""
        return served_tools(self.tools)

    @model_validator(mode="before")
    @classmethod
    def _refuse_formats_of_chats(cls, raw: Any) -> Any:
        # An ignored format would end in an answer that the client can't parse.
        if isinstance(raw, dict) and raw.get("response_format") is not None:
            raise FieldError("response_format", "is a field of /v1/chat/completions; give text.format here")
        return raw

    @model_validator(mode="after")
    def _check_pairs(self) -> ResponsesBody:
        if self.tool_choice not in ("none", "auto") and not self.functions:
            raise FieldError("tool_choice", "needs tools of type function")
        # An answer that must be a call has no text that a format could be for.
        if self.functions and self.tool_choice == "auto" and (grammar := self.grammar()) is not None:
            raise FieldError(grammar.field, "can't go with tools, unless tool_choice forces a call or forbids it")
        if self.max_output_tokens is not None and self.min_tokens > self.max_output_tokens:
            raise FieldError("min_tokens", f"is above max_output_tokens ({self.max_output_tokens})")
        return self
