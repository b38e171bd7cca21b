"""Types and limits of the tools in a body. The APIs describe tools in different shapes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

import orjson
from pydantic import AfterValidator, Field, model_validator

from .fields import Body, check_small
from .typed import check_required

MAX_TOOLS = 1024
MAX_TOOL_VALUES = 1 << 15
"""Maximum number of values in the descriptions of all tools; they hold at most ``MAX_FREE_CHARACTERS`` as well."""
MAX_TOOL_CALLS = 256
"""Maximum number of calls in one turn."""
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


def decode_arguments(name: str, given: str | dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of tool ``name``, parsed if they are text.

    Raises ``ValueError`` if they are no JSON object, or too large.
    """
    if isinstance(given, str):
        try:
            given = orjson.loads(given or "{}")
        except orjson.JSONDecodeError as e:
            raise ValueError(f"arguments of {name} are not JSON: {e}") from None
    if not isinstance(given, dict):
        raise ValueError(f"arguments of {name} are not a JSON object")
    return check_values(given)


Values = Annotated[dict[str, Any], AfterValidator(check_values)]
"""A tool's JSON schema, or the arguments of a call."""


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
