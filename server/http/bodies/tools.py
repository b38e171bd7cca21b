"""Limits and checks of tools and their calls, in the bodies of every API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import orjson
from pydantic import AfterValidator, Field

from .fields import check_small

MAX_TOOLS = 1024
MAX_TOOL_VALUES = 1 << 15
"""Maximum number of values in the descriptions of all tools; they hold at most ``MAX_FREE_CHARACTERS`` as well."""
MAX_TOOL_CALLS = 256
"""Maximum number of calls in one turn."""


def _check_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return check_small(schema, MAX_TOOL_VALUES)


ToolName = Annotated[str, Field(min_length=1, max_length=256)]
ToolSchema = Annotated[dict[str, Any], AfterValidator(_check_schema)]
"""JSON schema of a tool's parameters."""


def check_together(tools: Sequence[dict[str, Any]]) -> None:
    """Raise ``ValueError`` if the descriptions of all ``tools`` together are too large."""
    check_small({str(i): tool for i, tool in enumerate(tools)}, MAX_TOOL_VALUES)


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
    return check_small(given, MAX_TOOL_VALUES)
