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
ANY = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})


def types_of(schema: Any, root: Any = None, depth: int = 0) -> frozenset[str]:
    """Return the names of the JSON types that a schema allows; the empty set if it does not say.

    ``root``: schema that references such as "#/$defs/a" are looked up in. ``depth``: levels of schemas above this one.
    """
    if not isinstance(schema, Mapping) or depth > 8:
        return frozenset()
    found: set[str] = set()
    declared = schema.get("type")
    found.update([declared] if isinstance(declared, str) else declared if isinstance(declared, list) else [])
    for key in ("anyOf", "oneOf", "allOf"):
        for one in schema.get(key) or ():
            found |= types_of(one, root, depth + 1)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target = root
        for part in reference[2:].split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        found |= types_of(target, root, depth + 1)
    if not found:
        values = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else [])]
        found.update(_type_of(value) for value in values)
        if "properties" in schema:
            found.add("object")
        if "items" in schema:
            found.add("array")
    return frozenset(found)


def parameter(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """Return the names of the JSON types of the parameter ``name``; the empty set if ``schema`` does not say.

    ``schema``: JSON schema of all parameters of the tool.
    """
    properties = schema.get("properties")
    own = properties.get(name) if isinstance(properties, Mapping) else None
    if own is None:
        own = schema.get("additionalProperties")
    return types_of(own, schema)


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
