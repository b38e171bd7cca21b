"""Tools in a chat: what bodies hold, and what a template and a parser of answers need of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Discriminator, Field, PrivateAttr, Tag, ValidationInfo, model_validator

from ....messages.conversation import ChatToolCall
from ...output_parsers.base import Tools
from ..bodies.fields import MANY, ONE, Body
from ..bodies.tool_fields import MAX_TOOL_CALLS, MAX_TOOLS, CallId, ToolName, Values, check_together, decode_arguments
from ..bodies.unserved import ANYTHING, IGNORED, Unserved


class FunctionBody(Body):
    """A function that the model may call. ``parameters`` is a JSON schema of an object."""

    unserved: ClassVar[Unserved] = {"strict": IGNORED}

    name: ToolName
    description: str | None = None
    parameters: Values | None = None


class ToolBody(Body):
    """A tool that the model may call."""

    unserved: ClassVar[Unserved] = {"cache_control": ANYTHING}

    type: Literal["function"]
    function: FunctionBody


class NamedFunction(Body):
    """The name of a function."""

    name: ToolName


class NamedToolChoice(Body):
    """The tool that the model has to call."""

    type: Literal["function"]
    function: NamedFunction


class CalledFunction(Body):
    """The call of a function. ``arguments``: a JSON object, as text or decoded."""

    name: ToolName
    arguments: str | dict[str, Any] = "{}"


class ToolCallBody(Body):
    """A call in the assistant's turn."""

    unserved: ClassVar[Unserved] = {"index": ANYTHING}

    id: CallId = ""
    type: Literal["function"] = "function"
    function: CalledFunction

    _decoded: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _decode(self, info: ValidationInfo) -> ToolCallBody:
        self._decoded = decode_arguments(self.function.name, self.function.arguments, info.context)
        return self

    @property
    def decoded(self) -> dict[str, Any]:
        """The call's arguments, parsed if they are text."""
        return self._decoded


def _check_tools(tools: list[ToolBody]) -> list[ToolBody]:
    check_together([tool.model_dump() for tool in tools])
    return tools


ToolBodies = Annotated[list[ToolBody], Field(fail_fast=True, max_length=MAX_TOOLS), AfterValidator(_check_tools)]
ToolCallBodies = Annotated[list[ToolCallBody], Field(fail_fast=True, max_length=MAX_TOOL_CALLS)]
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(ONE)] | Annotated[NamedToolChoice, Tag(MANY)],
    Discriminator(lambda value: ONE if isinstance(value, str) else MANY),
]


def read_calls(calls: Sequence[ToolCallBody]) -> list[ChatToolCall]:
    """Convert the tool calls of a message to what chat templates get, with decoded arguments."""
    return [ChatToolCall(call.id, call.function.name, call.decoded) for call in calls]


def for_template(tools: Sequence[ToolBody]) -> list[dict[str, Any]]:
    """Return ``tools`` as JSON-ready objects in OpenAI's shape, with only the fields that the client gave."""
    return [tool.model_dump(mode="python", exclude_unset=True) for tool in tools]


def schemas_of(tools: Sequence[ToolBody]) -> Tools:
    """Return the JSON schema of each tool's parameters, by the tool's name; {} if the client gave none."""
    return {tool.function.name: tool.function.parameters or {} for tool in tools}
