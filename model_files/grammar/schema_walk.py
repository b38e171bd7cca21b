"""Walks through the schemas within a JSON schema."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Change = Callable[[dict[str, Any]], Any]
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_LISTS = frozenset({"anyOf", "allOf", "oneOf", "prefixItems", "items"})
_SCHEMAS = frozenset(
    (
        *("items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties"),
        *("contains", "propertyNames", "not", "if", "then", "else"),
    )
)


def change_all(schema: Any, change: Change, but: frozenset[str] = frozenset()) -> Any:
    """Return a copy of ``schema`` with each schema in it replaced by what ``change`` returns, outer ones first.

    ``but``: keywords that are left as they are, with the schemas in them.
    """
    if not isinstance(schema, dict):
        return schema
    changed = change(schema)
    if not isinstance(changed, dict):
        return changed
    return {key: value if key in but else _inner(key, value, change, but) for key, value in changed.items()}


def _inner(key: str, value: Any, change: Change, but: frozenset[str]) -> Any:
    if key in _BY_NAME and isinstance(value, dict):
        return {name: change_all(inner, change, but) for name, inner in value.items()}
    if key in _LISTS and isinstance(value, list):
        return [change_all(inner, change, but) for inner in value]
    return change_all(value, change, but) if key in _SCHEMAS else value
