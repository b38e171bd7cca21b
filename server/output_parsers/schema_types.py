"""Turns values that a format writes as bare text into JSON, by the tool's schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from .reader import Malformed, parse_json, strict_json

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_CONSTANTS = {"true": "boolean", "false": "boolean", "null": "null", "none": "null"}
MAX_SCHEMAS = 256
"""Maximum schemas that are read for one parameter."""
MAX_DEPTH = 8
"""Maximum levels of nested schemas, and of names in a reference."""
ANY = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})


def types_of(schema: Any, root: Any = None) -> frozenset[str]:
    """Return the names of the JSON types that a schema allows; the empty set if it does not say.

    What is no schema says nothing, in any place. At most ``MAX_SCHEMAS`` nested and referenced schemas are read.

    ``root``: schema that references such as "#/$defs/a" are looked up in.
    """
    return _Types(root).of(schema, 0)


class _Types:
    """Finds the types of one schema. References may form cycles, and combinations multiply: both are bounded."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = MAX_SCHEMAS

    def of(self, schema: Any, depth: int) -> frozenset[str]:
        """Return the types that ``schema`` allows; ``depth``: levels of schemas above it."""
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH or self._left == 0:
            return frozenset()
        self._left -= 1
        declared = schema.get("type")
        found = {one for one in (declared if isinstance(declared, list) else [declared]) if isinstance(one, str)}
        for key in ("anyOf", "oneOf", "allOf"):
            for one in _list(schema.get(key)):
                found |= self.of(one, depth + 1)
        found |= self.of(self._target(schema.get("$ref")), depth + 1)
        return frozenset(found or _types_of_values(schema))

    def _target(self, reference: Any) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return None
        target = self._root
        for part in reference[2:].split("/", MAX_DEPTH):
            target = target.get(part) if isinstance(target, Mapping) else None
        return target


def _types_of_values(schema: Mapping[str, Any]) -> set[str]:
    """Return the JSON types that a schema without declared types implies.

    They are those of ``enum`` and ``const``, "object" if it has ``properties``, and "array" if it has ``items``.
    """
    found = {_type_of(value) for value in [*_list(schema.get("enum")), *(schema[k] for k in ("const",) if k in schema)]}
    if "properties" in schema:
        found.add("object")
    if "items" in schema:
        found.add("array")
    return found


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def parameter(schema: Any, name: str) -> frozenset[str]:
    """Return the names of the JSON types of the parameter ``name``; the empty set if ``schema`` does not say.

    ``schema``: JSON schema of all parameters of the tool.
    """
    own = properties_of(schema).get(name)
    if own is None and isinstance(schema, Mapping):
        own = schema.get("additionalProperties")
    return types_of(own, schema)


def properties_of(schema: Any) -> Mapping[str, Any]:
    """Return the schemas of the parameters by name; empty if ``schema`` has none."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def to_json(text: str, types: frozenset[str]) -> str:
    """Return bare text as the JSON text of a value of one of ``types``, if it can be read so; else as a JSON string.

    If ``types`` is empty, text that is valid JSON counts as that JSON value.
    """
    allowed = types or ANY
    bare = text.strip()
    kind = _CONSTANTS.get(bare.lower())
    if kind in allowed and (kind != "null" or types or bare == "null") and (types or bare in ("true", "false", "null")):
        return "null" if kind == "null" else bare.lower()
    if types and "string" in types and not types & {"object", "array", "number", "integer", "boolean"}:
        return _string(text)
    if bare[:1] in ("{", "[") and allowed & {"object", "array"}:
        try:
            value = parse_json(bare)
        except Malformed:
            return _string(text)
        if _type_of(value) in allowed:
            return strict_json(bare)
    if _NUMBER.fullmatch(bare) and ("number" in allowed or ("integer" in allowed and _INTEGER.fullmatch(bare))):
        return bare
    if not types and bare[:1] == '"':
        try:
            if isinstance(parse_json(bare), str):
                return strict_json(bare)
        except Malformed:
            pass
    return _string(text)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, list):
        return "array"
    return "object" if isinstance(value, dict) else "string"
