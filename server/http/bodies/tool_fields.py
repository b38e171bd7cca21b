"""Types and limits of the tools in a body. The APIs describe tools in different shapes."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

import orjson
from pydantic import AfterValidator, Field, ValidationInfo, model_validator

from .fields import INT32_MAX, MAX_FREE_CHARACTERS, Body, check_small, count_small
from .typed import check_required

MAX_TOOLS = 1024
MAX_TOOL_VALUES = 1 << 15
"""Maximum number of values in the descriptions of all tools; they hold at most ``MAX_FREE_CHARACTERS`` as well."""
MAX_TOOL_CALLS = 256
"""Maximum number of calls in one turn."""
MAX_ARGUMENT_VALUES = 1 << 17
"""Maximum number of values in the arguments of all calls of a body. Each call has at most ``MAX_TOOL_VALUES``."""
MAX_ARGUMENT_TEXT = 8 * MAX_FREE_CHARACTERS
"""Maximum characters of one call's arguments as text, where one character of a string may be written as six."""
FEW = 64
JSON_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""A string in JSON text; one without an end goes to the end of the text, so that a search takes linear time."""
ToolName = Annotated[str, Field(min_length=1, max_length=256)]
ToolType = Annotated[str, Field(max_length=256)]
CallId = Annotated[str, Field(max_length=256)]


def check_values(value: dict[str, Any]) -> dict[str, Any]:
    """Check the size of a tool's JSON schema, or of a call's arguments, and return it unchanged.

    Raises ``ValueError`` if it has more than ``MAX_TOOL_VALUES`` values, too many characters, or too many levels.
    """
    return check_small(value, MAX_TOOL_VALUES)


def check_together(tools: list[dict[str, Any]]) -> None:
    """Raise ``ValueError`` if the descriptions of all ``tools`` together are larger than one may be."""
    check_values({str(i): tool for i, tool in enumerate(tools)})


class ArgumentBudget:
    """Counts the values in the arguments of all calls of one body, which is validated with it as its context.

    Arguments may be text. Values in there are not counted before the body is parsed, as those of the body are.
    """

    def __init__(self) -> None:
        self._left = MAX_ARGUMENT_VALUES

    def take(self, values: int) -> None:
        """Count ``values`` more. Raises ``ValueError`` if they are too many."""
        self._left -= values
        if self._left < 0:
            raise ValueError(f"the arguments of all calls hold more than {MAX_ARGUMENT_VALUES} values")


def values_in_text(text: str) -> int:
    """Return about how many values JSON ``text`` has: its commas, lists and objects, without those in strings.

    It is counted before anything is parsed, as each value takes up to a hundred times its length in memory.
    """
    return _separators(text) if _separators(text) <= FEW else _separators(JSON_STRING.sub("", text))


def _separators(text: str) -> int:
    return text.count(",") + text.count("[") + text.count("{")


def decode_arguments(name: str, given: str | dict[str, Any], budget: ArgumentBudget | None = None) -> dict[str, Any]:
    """Return the arguments of a call of tool ``name``, parsed if they are text.

    Raises ``ValueError`` if they are no JSON object, too large, or more than ``budget`` has left.
    """
    if isinstance(given, str):
        values = values_in_text(given) if len(given) <= MAX_ARGUMENT_TEXT else INT32_MAX
        if values > MAX_TOOL_VALUES:
            raise ValueError(f"arguments of {name} hold more than {MAX_TOOL_VALUES} values or are too long")
        if budget is not None:
            budget.take(values)
        try:
            given = orjson.loads(given or "{}")
        except orjson.JSONDecodeError as e:
            raise ValueError(f"arguments of {name} are not JSON: {e}") from None
    elif budget is not None:
        budget.take(count_small(given, MAX_TOOL_VALUES))
    if not isinstance(given, dict):
        raise ValueError(f"arguments of {name} are not a JSON object")
    return check_values(given)


def _check_arguments(value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    return decode_arguments("a call", value, info.context)


Arguments = Annotated[dict[str, Any], AfterValidator(_check_arguments)]
"""The arguments of a call, not as text."""
Values = Annotated[dict[str, Any], AfterValidator(check_values)]
"""A tool's JSON schema."""


class ListedTool(Body):
    """A tool in a list. Tools of other types than ``served_type`` are ignored, and named in the answer's header."""

    served_type: ClassVar[str]
    required: ClassVar[tuple[str, ...]]
    """Fields that a tool of the served type has."""

    type: ToolType

    @classmethod
    def is_ignored(cls, content: Mapping[str, Any]) -> bool:
        """Return whether a tool with this ``content`` is of another type."""
        kind = content.get("type")
        return isinstance(kind, str) and kind != cls.served_type

    @abstractmethod
    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates get it, in OpenAI's shape. Call it only if the tool is not ignored."""

    @model_validator(mode="before")
    @classmethod
    def _drop_fields_of_other_types(cls, raw: Any) -> Any:
        return {"type": raw["type"]} if isinstance(raw, dict) and cls.is_ignored(raw) else raw

    @model_validator(mode="after")
    def _check_required(self) -> ListedTool:
        check_required(self, self.type, self.required if self.type == self.served_type else ())
        return self


T = TypeVar("T", bound=ListedTool)


def served_tools(tools: Sequence[T]) -> list[T]:
    """Return the tools that are of the served type."""
    return [tool for tool in tools if tool.type == tool.served_type]


def _check_tools(tools: list[T]) -> list[T]:
    check_together([tool.for_template() for tool in served_tools(tools)])
    return tools


ToolList = Annotated[list[T], Field(fail_fast=True, max_length=MAX_TOOLS), AfterValidator(_check_tools)]
"""Tools of type ``T``, and ignored ones."""
