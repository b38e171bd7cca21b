"""Keywords of JSON schemas that llguidance lacks, in terms of those that it has.

A rewritten schema accepts nothing that the original refuses, but may refuse some of what it accepts: it says what the
model may write. Where the complement of a schema is needed, as for ``not``, a part of it will do. A keyword that cannot
be rewritten stays, and llguidance refuses it by its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .schema_walk import change_all

TYPES = ("array", "boolean", "null", "number", "object", "string")
MAX_LEVELS = 5
"""Levels of schemas within each other that a complement looks into."""
MAX_CANDIDATES = 8
"""Properties that a complement looks at."""
EXACT = frozenset({"oneOf", "not", "if"})
"""Keywords with schemas that must not become narrower where the keyword stays."""
_MISSING = object()


class Rewriter:
    """Rewrites one schema. References are resolved in its ``root``."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root

    def rewritten(self) -> Any:
        """Return a copy of the schema, with keywords that llguidance lacks replaced by others where that works."""
        return change_all(self._root, self._rewrite, EXACT)

    def _rewrite(self, schema: dict[str, Any]) -> Any:
        made, also = dict(schema), list[Any]()
        for rewrite in (self._not, self._dependencies, self._condition, self._one_of):
            also += rewrite(made)
        _name_properties(made)
        if not also:
            return made
        return made | {"allOf": [*made.get("allOf", ()), *also]}

    def _not(self, made: dict[str, Any]) -> Iterator[Any]:
        if "not" in made and (other := self.outside(made["not"])) is not None:
            del made["not"]
            yield other

    @staticmethod
    def _dependencies(made: dict[str, Any]) -> Iterator[Any]:
        for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
            for name, needed in made.pop(keyword, {}).items():
                yield {"anyOf": [without(name), {"required": needed} if isinstance(needed, list) else needed]}

    def _condition(self, made: dict[str, Any]) -> Iterator[Any]:
        if "if" not in made:
            for name in ("then", "else"):
                made.pop(name, None)
        elif (other := self.outside(made["if"])) is not None:
            condition, then, otherwise = made.pop("if"), made.pop("then", True), made.pop("else", True)
            yield {"anyOf": [{"allOf": [condition, then]}, {"allOf": [other, otherwise]}]}

    def _one_of(self, made: dict[str, Any]) -> Iterator[Any]:
        choices = made.get("oneOf")
        if not isinstance(choices, list) or len(choices) > MAX_CANDIDATES:
            return
        outside = [self.outside(choice) for choice in choices]
        # All or none: what a choice has in common with another must be in neither.
        if all(other is not None for other in outside):
            del made["oneOf"]
            others = [[other for j, other in enumerate(outside) if j != i] for i in range(len(choices))]
            yield {"anyOf": [{"allOf": [choice, *rest]} for choice, rest in zip(choices, others, strict=True)]}

    def outside(self, schema: Any, levels: int = MAX_LEVELS) -> Any:
        """Return a schema that accepts nothing that ``schema`` accepts; None if none is found.

        ``levels``: how many levels of inner schemas are looked into.
        """
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, dict) or not levels:
            return None
        if not schema:
            return False
        found = [other for other in self._outside(schema, levels - 1) if other is not None]
        return {"anyOf": found} if len(found) > 1 else next(iter(found), None)

    def _outside(self, schema: dict[str, Any], levels: int) -> Iterator[Any]:
        """Yield schemas, each outside a single keyword of ``schema``; None for a keyword without one."""
        if "$ref" in schema:
            yield self.outside(self._resolve(schema["$ref"]), levels)
        if "not" in schema:
            yield schema["not"]
        yield _outside_types(schema)
        for name in list(schema.get("required", ()))[:MAX_CANDIDATES]:
            yield {"type": "object"} | without(name)
        for name, inner in list(schema.get("properties", {}).items())[:MAX_CANDIDATES]:
            if (other := self.outside(inner, levels)) is not None and other is not False:
                yield {"type": "object", "required": [name], "properties": {name: other}}
        for inner in schema.get("allOf", ()):
            yield self.outside(inner, levels)
        for keyword in ("anyOf", "oneOf"):
            if choices := schema.get(keyword):
                others = [self.outside(choice, levels) for choice in choices]
                yield {"allOf": others} if all(other is not None for other in others) else None

    def _resolve(self, reference: str) -> Any:
        """Return the schema that a local reference names; None for any other reference."""
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return None
        found: Any = self._root
        for part in reference[2:].split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            found = found.get(name, _MISSING) if isinstance(found, dict) else _MISSING
        return None if found is _MISSING else found


def without(name: str) -> dict[str, Any]:
    """Return a schema that refuses objects with the property ``name``."""
    return {"properties": {name: False}}


def _outside_types(schema: dict[str, Any]) -> dict[str, Any] | None:
    """Return a schema of the types that no value of ``schema`` has; None if there are none, or none are known."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        has = {_type_of(value) for value in values}
    elif "type" in schema:
        has = {schema["type"]} if isinstance(schema["type"], str) else set(schema["type"])
        has = {"number" if name == "integer" else name for name in has}
    else:
        return None
    others = [name for name in TYPES if name not in has]
    return {"type": others} if others else None


def _type_of(value: Any) -> str:
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _name_properties(made: dict[str, Any]) -> None:
    """Replace ``propertyNames`` in ``made``, in place, if it allows any name or names by a pattern."""
    names = made.get("propertyNames")
    if names is True or names in ({}, {"type": "string"}):
        del made["propertyNames"]
    elif (
        isinstance(names, dict)
        and names.keys() - {"type"} == {"pattern"}
        and not made.keys() & {"properties", "patternProperties"}
    ):
        del made["propertyNames"]
        made["patternProperties"] = {names["pattern"]: made.get("additionalProperties", True)}
        made["additionalProperties"] = False
