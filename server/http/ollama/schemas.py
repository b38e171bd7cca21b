"""What ``POST /api/chat``, ``/api/generate`` and ``/api/show`` take: Ollama's bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from ....messages.grammar import Grammar
from ...output_parsers.base import Tools
from ..bodies.fields import INT32_MAX, INTEGRAL, TAG, Body, FieldError
from ..bodies.message_fields import MAX_MESSAGES
from ..bodies.request_fields import (
    MinP,
    Penalty,
    RepetitionPenalty,
    RequestFields,
    SamplingFields,
    Seed,
    Stops,
    Temperature,
    TopK,
    TopP,
)
from ..bodies.structure import ANY_OBJECT, grammars_of, one_grammar
from ..bodies.tool_fields import (
    MAX_TOOL_CALLS,
    Arguments,
    CallId,
    ListedTool,
    ToolList,
    ToolName,
    ToolType,
    Values,
    served_tools,
)
from ..bodies.unserved import ANYTHING, IGNORED, Unserved, neutral

TEXT, SCHEMA, SWITCH, LEVEL = TAG + "text", TAG + "schema", TAG + "switch", TAG + "level"
FUNCTION = "function"

OPTIONS: Unserved = {
    # How a model is loaded. Here the server's own options say that.
    **dict.fromkeys(("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram"), IGNORED),
    **dict.fromkeys(("f16_kv", "logits_all", "vocab_only", "use_mmap", "use_mlock", "embedding_only"), IGNORED),
    "draft_num_predict": IGNORED,
    # The context is never shifted, and the repetition penalty regards all tokens.
    **dict.fromkeys(("num_keep", "repeat_last_n", "penalize_newline"), IGNORED),
    **dict.fromkeys(("mirostat_tau", "mirostat_eta"), ANYTHING),
    **neutral(0, names="mirostat"),
    **neutral(1, names="tfs_z typical_p"),
}

COMMON: Unserved = {
    **dict.fromkeys(("keep_alive", "truncate", "shift"), IGNORED),
    **neutral(False, names="logprobs _debug_render_only"),
    **neutral(0, names="top_logprobs"),
}

GENERATE: Unserved = {
    **COMMON,
    **neutral("", names="suffix template"),
    **neutral([], names="context images"),
    **neutral(names="width height steps"),
}


class OllamaOptions(Body):
    """``options``. Those that have another name elsewhere in this server are ``OTHER_NAMES``."""

    unserved: ClassVar[Unserved] = OPTIONS
    OTHER_NAMES: ClassVar[Mapping[str, str]] = {"repeat_penalty": "repetition_penalty"}

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = -1
    min_p: MinP = 0.0
    repeat_penalty: RepetitionPenalty = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    stop: Stops = Field(default_factory=list)
    seed: Seed | None = None
    num_predict: Annotated[int, Field(ge=-2, le=INT32_MAX), INTEGRAL] = -1
    """Maximum number of tokens to generate; 0 and less: until the context is full."""

    @property
    def max_tokens(self) -> int | None:
        """Maximum number of tokens to generate; None: the rest of the context."""
        return self.num_predict if self.num_predict > 0 else None

    def sampling(self) -> SamplingFields:
        """Return the options that were given as this server's sampling fields."""
        given = self.model_fields_set - {"seed", "num_predict"}
        return SamplingFields(**{self.OTHER_NAMES.get(name, name): getattr(self, name) for name in given})


Format = Annotated[
    Annotated[Literal["", "json"], Tag(TEXT)] | Annotated[dict[str, Any], Tag(SCHEMA)],
    Discriminator(lambda value: SCHEMA if isinstance(value, dict) else TEXT),
]
Think = Annotated[
    Annotated[bool, Tag(SWITCH)] | Annotated[Literal["low", "medium", "high", "max"], Tag(LEVEL)],
    Discriminator(lambda value: LEVEL if isinstance(value, str) else SWITCH),
]


class OllamaBody(RequestFields):
    """What both generating bodies share."""

    belongs: ClassVar[Mapping[str, str]] = dict.fromkeys((*OllamaOptions.model_fields, *OPTIONS), "options")

    model: str | None = None
    stream: bool = True
    options: OllamaOptions = OllamaOptions()
    format: Format = ""
    """``json``: a JSON object. Otherwise a JSON schema."""
    think: Think | None = None
    """Whether the model reasons, or how much. It goes to the model's template."""

    def grammar(self) -> Grammar | None:
        """Return what the output must match; None: anything. Raises ``FieldError`` if it is too large."""
        if isinstance(self.format, str):
            source: Any = ANY_OBJECT if self.format else None
        else:
            # A schema that allows anything still asks for JSON.
            source = self.format or "{}"
        return one_grammar(grammars_of({"format": ("json_schema", source)}))

    @property
    def template_args(self) -> dict[str, Any]:
        """Variables of the chat template that ask for reasoning. Templates have different names for them."""
        if self.think is None:
            return {}
        level = {"reasoning_effort": self.think} if isinstance(self.think, str) else {}
        return {"enable_thinking": bool(self.think), "thinking": bool(self.think), **level}

    @model_validator(mode="after")
    def _check_format(self) -> OllamaBody:
        self.grammar()
        return self


class OllamaCalledFunction(Body):
    """The call of a function."""

    unserved: ClassVar[Unserved] = dict.fromkeys(("index", "description"), ANYTHING)

    name: ToolName
    arguments: Arguments = Field(default_factory=dict)


class OllamaCall(Body):
    """A call in the assistant's turn."""

    unserved: ClassVar[Unserved] = {"type": ANYTHING}

    id: CallId = ""
    function: OllamaCalledFunction


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


class OllamaMessage(Body):
    """One turn of a conversation. ``tool_name`` and ``tool_call_id`` say which call a turn of role "tool" answers."""

    unserved: ClassVar[Unserved] = neutral([], names="images")

    role: Annotated[Literal["system", "user", "assistant", "tool"], BeforeValidator(_lower)]
    content: str = ""
    thinking: str | None = None
    tool_calls: Annotated[list[OllamaCall], Field(fail_fast=True, max_length=MAX_TOOL_CALLS)] = Field(
        default_factory=list
    )
    tool_name: ToolName | None = None
    tool_call_id: CallId | None = None

    @model_validator(mode="after")
    def _check_role(self) -> OllamaMessage:
        if self.tool_calls and self.role != "assistant":
            raise FieldError("tool_calls", 'belongs to a message of role "assistant"')
        return self


class OllamaFunction(Body):
    """A function that the model may call. ``parameters`` is a JSON schema of an object."""

    unserved: ClassVar[Unserved] = {"strict": IGNORED}

    name: ToolName
    description: str = ""
    parameters: Values = Field(default_factory=dict)


class OllamaTool(ListedTool):
    """A tool that the model may call. Only functions are served."""

    unserved: ClassVar[Unserved] = {"items": ANYTHING}
    served_type = FUNCTION
    required = (FUNCTION,)

    type: ToolType = FUNCTION
    function: OllamaFunction | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the tool in the shape that chat templates get, with only the fields that the client gave."""
        return {"type": FUNCTION, **self.model_dump(exclude={"type"}, exclude_unset=True)}


class OllamaChatBody(OllamaBody):
    """``POST /api/chat``."""

    unserved: ClassVar[Unserved] = COMMON

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True, max_length=MAX_MESSAGES)] = Field(
        default_factory=list
    )
    """Empty: the answer only says that the model is loaded."""
    tools: ToolList[OllamaTool] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_pairs(self) -> OllamaChatBody:
        if self.schemas and self.grammar() is not None:
            raise FieldError("format", "can't go with tools; leave one of them out")
        return self

    @property
    def tools_for_template(self) -> list[dict[str, Any]]:
        """The functions among the tools, as chat templates get them."""
        return [tool.for_template() for tool in served_tools(self.tools)]

    @property
    def schemas(self) -> Tools:
        """JSON schema of each function's parameters, by its name."""
        functions = [tool.function for tool in self.tools if tool.function is not None]
        return {function.name: function.parameters for function in functions}


class OllamaGenerateBody(OllamaBody):
    """``POST /api/generate``."""

    unserved: ClassVar[Unserved] = GENERATE

    prompt: str = ""
    """Empty: the answer only says that the model is loaded."""
    system: str = ""
    raw: bool = False
    """Whether the model gets the prompt as it is, without its chat template."""

    @model_validator(mode="after")
    def _check_raw(self) -> OllamaGenerateBody:
        if self.raw and self.system:
            raise FieldError("system", 'can\'t go with "raw": true, which leaves the chat template out')
        if self.raw and self.think:
            raise FieldError("think", 'can\'t go with "raw": true, which leaves the chat template out')
        return self


class OllamaShowBody(Body):
    """``POST /api/show``. ``name`` is an older word for ``model``."""

    unserved: ClassVar[Unserved] = dict.fromkeys(("system", "template", "options", "verbose"), IGNORED)

    model: str | None = None
    name: str | None = None
