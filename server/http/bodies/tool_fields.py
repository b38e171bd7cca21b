"""Types and limits of the tools in a body. The APIs describe tools in different shapes."""

from __future__ import annotations

from typing import Annotated, Any

import orjson
from pydantic import AfterValidator, Field

from .fields import check_small

MAX_TOOLS = 1024
MAX_TOOL_VALUES = 1 << 15
"""Maximum number of values in the descriptions of all tools; they hold at most ``MAX_FREE_CHARACTERS`` as well."""
MAX_TOOL_CALLS = 256
"""Maximum number of calls in one turn."""
ToolName = Annotated[str, Field(min_length=1, max_length=256)]
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
