"""Complements of JSON schemas: `not`, `oneOf` and `if` are rewritten with them.

llguidance has none. Parts of a complement will do, as they only say what the model may write.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import inf
from typing import Any

TYPES = ("array", "boolean", "null", "number", "object", "string")
MAX_LEVELS = 5
"""Levels of schemas within each other that are looked into."""
MAX_CANDIDATES = 8
"""Properties, and parts of a complement, that are looked at."""
MAX_PATTERN_CHARACTERS = 1 << 14
_MISSING = object()
_BOUNDS = (
    ("minimum", "number", "exclusiveMaximum", 0),
    ("maximum", "number", "exclusiveMinimum", 0),
    ("exclusiveMinimum", "number", "maximum", 0),
    ("exclusiveMaximum", "number", "minimum", 0),
    ("minLength", "string", "maxLength", -1),
    ("maxLength", "string", "minLength", 1),
    ("minItems", "array", "maxItems", -1),
    ("maxItems", "array", "minItems", 1),
    ("minProperties", "object", "maxProperties", -1),
    ("maxProperties", "object", "minProperties", 1),
)
"""Limits: keyword, type, keyword of the values beyond it, and what is added to the limit for these."""


class Complements:
    """Finds complements. References are resolved in the schema ``root``.

    ``parts``: how many parts of a complement ``outside_within`` returns.
    """

    def __init__(self, root: dict[str, Any], parts: int) -> None:
        self._root = root
        self.has_prefixes = "2020-12" in str(root.get("$schema", "2020-12"))
        """Whether the draft of the schema has `prefixItems`."""
        self._parts = parts

    def outside(self, schema: Any, levels: int = MAX_LEVELS) -> Any:
        """Return a schema that accepts no value that ``schema`` accepts; None if none is found.

        It need not accept all other values. It is False, which accepts nothing, if ``schema`` accepts every value.
        ``levels``: how many levels of nested schemas are looked into.
        """
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, dict) or not levels:
            return None
        if not schema:
            return False
        found = list(self._outside(schema, levels - 1))
        some = [other for other in found if other is not None and other is not False][:MAX_CANDIDATES]
        if len(some) > 1:
            return {"anyOf": some}
        return some[0] if some else (False if found and None not in found else None)

    def outside_within(self, schema: Any, whole: Any) -> Any:
        """Return what ``outside`` returns for ``schema``, without the parts that ``whole`` certainly refuses.

        ``whole``: the schema that the result is to be used in. A property of ``whole`` that ``schema`` forbids makes a
        part as well. At most as many parts remain as the constructor's ``parts`` says. None if there are none.
        """
        other = self.outside(schema)
        if other is False:
            return False
        needs = [{"type": "object", "required": [name]} for name in self._names(whole)[:MAX_CANDIDATES]]
        parts = [need for need in needs if self.are_disjoint(need, schema)]
        if other is not None:
            parts += other["anyOf"] if isinstance(other, dict) and other.keys() == {"anyOf"} else [other]
        some = [part for part in parts if not self.are_disjoint(part, whole)][: self._parts]
        if len(some) > 1:
            return {"anyOf": some}
        return some[0] if some else None

    def _names(self, schema: Any, levels: int = MAX_LEVELS) -> list[str]:
        """Return names of properties that ``schema`` mentions, also those behind references and in `allOf`.

        ``levels``: how many of these are followed, one within another. A name may occur several times.
        """
        if not isinstance(schema, dict) or not levels:
            return []
        inner = [self.resolve(schema.get("$ref", "")), *schema.get("allOf", ())]
        return [*schema.get("properties", {}), *(name for one in inner for name in self._names(one, levels - 1))]

    def _outside(self, schema: dict[str, Any], levels: int) -> Iterator[Any]:
        """Yield schemas of values that ``schema`` refuses by one of its keywords, for each keyword that is understood.

        None stands for a keyword without such a schema, and False for one that refuses nothing. ``levels``: how many
        more levels of nested schemas are looked into.
        """
        if "$ref" in schema:
            # Until draft 7, the keywords beside a reference do not count.
            yield self.outside(self.resolve(schema["$ref"]), levels)
            return
        if "not" in schema:
            yield schema["not"]
        yield from _outside_types(schema)
        yield from _outside_values(schema)
        yield from _outside_bounds(schema)
        for name in required_names(schema)[:MAX_CANDIDATES]:
            yield {"type": "object"} | without(name)
        for name, inner in list(schema.get("properties", {}).items())[:MAX_CANDIDATES]:
            if (other := self.outside(inner, levels)) is not None and other is not False:
                yield {"type": "object", "required": [name], "properties": {name: other}}
        yield from self._outside_items(schema, levels)
        for inner in schema.get("allOf", ()):
            yield self.outside(inner, levels)
        for keyword in ("anyOf", "oneOf"):
            if choices := schema.get(keyword):
                others = [self.outside(choice, levels) for choice in choices]
                yield {"allOf": others} if all(other is not None for other in others) else None

    def _outside_items(self, schema: dict[str, Any], levels: int) -> Iterator[Any]:
        if self.has_prefixes and isinstance(schema.get("items"), dict | bool) and "prefixItems" not in schema:
            other = self.outside(schema["items"], levels)
            yield other and {"type": "array", "minItems": 1, "prefixItems": [other]}
        if "contains" in schema and schema.get("minContains", 1):
            other = self.outside(schema["contains"], levels)
            yield None if other is None else {"type": "array", "items": other}

    def are_disjoint(self, one: Any, two: Any, levels: int = MAX_LEVELS) -> bool:
        """Return whether it is certain that no value is accepted by both schemas; False if that is not known.

        ``levels``: how many levels of nested schemas are looked into.
        """
        if one is False or two is False:
            return True
        if not isinstance(one, dict) or not isinstance(two, dict) or not levels:
            return False
        if _are_types_disjoint(one, two) or self._are_objects_disjoint(one, two, levels - 1):
            return True
        return self._is_part_disjoint(one, two, levels - 1) or self._is_part_disjoint(two, one, levels - 1)

    def _is_part_disjoint(self, one: dict[str, Any], two: Any, levels: int) -> bool:
        """Return whether a reference, `allOf`, `anyOf` or `oneOf` in ``one`` makes it surely disjoint from ``two``."""
        if "$ref" in one:
            return self.are_disjoint(self.resolve(one["$ref"]), two, levels)
        if any(self.are_disjoint(inner, two, levels) for inner in one.get("allOf", ())):
            return True
        choices = [one[keyword] for keyword in ("anyOf", "oneOf") if one.get(keyword)]
        return any(all(self.are_disjoint(inner, two, levels) for inner in inners) for inners in choices)

    def _are_objects_disjoint(self, one: dict[str, Any], two: dict[str, Any], levels: int) -> bool:
        """Return whether both schemas are of objects, with a property that has no value in both."""
        if "$ref" in one or "$ref" in two or _types(one) & _types(two) != {"object"}:
            return False
        names = required_names(one) + required_names(two)
        return any(self.are_disjoint(_property(one, name), _property(two, name), levels) for name in names)

    def resolve(self, reference: str) -> Any:
        """Return the schema that a local reference names; None for any other reference."""
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return None
        found: Any = self._root
        for part in reference[2:].split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            found = found.get(name, _MISSING) if isinstance(found, dict) else _MISSING
        return None if found is _MISSING else found


def without(name: str) -> dict[str, Any]:
    """Return the schema of objects that lack the property ``name``."""
    return {"properties": {name: False}}


def required_names(schema: dict[str, Any]) -> list[str]:
    """Return the names that are required, each once; none if `required` is a boolean, as before draft 4."""
    names = schema.get("required")
    return list(dict.fromkeys(names)) if isinstance(names, list) else []


def _property(schema: dict[str, Any], name: str) -> Any:
    """Return the schema of the property ``name`` in objects of ``schema``.

    For one that is not declared, it is that of ``additionalProperties``, by default True.
    If the schema has ``patternProperties``, it is True: the patterns are not looked into.
    """
    if name in schema.get("properties", {}):
        return schema["properties"][name]
    return True if "patternProperties" in schema else schema.get("additionalProperties", True)


def listed_values(schema: dict[str, Any]) -> list[Any] | None:
    """Return the values that ``schema`` lists; None if it lists none."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def _types(schema: dict[str, Any]) -> set[str]:
    """Return the types that values of ``schema`` may have. An integer is a number."""
    if (values := listed_values(schema)) is not None:
        return {_type_of(value) for value in values}
    given = schema.get("type", TYPES)
    return {"number" if name == "integer" else name for name in ((given,) if isinstance(given, str) else given)}


def _type_of(value: Any) -> str:
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _are_types_disjoint(one: dict[str, Any], two: dict[str, Any]) -> bool:
    """Return whether the types or the listed values of two schemas have nothing in common."""
    if "$ref" in one or "$ref" in two:
        return False
    ones, twos = listed_values(one), listed_values(two)
    if ones is not None and twos is not None:
        return not any(value in twos for value in ones)
    return not _types(one) & _types(two)


def _outside_types(schema: dict[str, Any]) -> Iterator[Any]:
    """Yield one schema of all types that no value of ``schema`` has.

    If ``type`` lists every type, yield False, which matches nothing. If listed values have every type, yield None: by
    types, nothing is known to be outside. Yield nothing for a schema without ``type``, ``const`` and ``enum``.
    """
    if schema.keys() & {"const", "enum", "type"}:
        has = _types(schema)
        others = [name for name in TYPES if name not in has]
        yield {"type": others} if others else (False if "type" in schema and listed_values(schema) is None else None)


def _outside_values(schema: dict[str, Any]) -> Iterator[Any]:
    """Yield schemas of values of the listed types that are not listed."""
    values = listed_values(schema) or []
    texts = {value for value in values if isinstance(value, str)}
    if texts and (pattern := _other_than(texts)):
        yield {"type": "string", "pattern": pattern}
    if numbers := [value for value in values if _type_of(value) == "number"]:
        yield {"type": "number", "exclusiveMinimum": max(numbers)}
        yield {"type": "number", "exclusiveMaximum": min(numbers)}
    if len(booleans := {value for value in values if isinstance(value, bool)}) == 1:
        yield {"enum": [not booleans.pop()]}


def _outside_bounds(schema: dict[str, Any]) -> Iterator[Any]:
    """Yield schemas of values beyond the limits of ``schema``."""
    for keyword, kind, beyond, step in _BOUNDS:
        limit, floor = schema.get(keyword), -inf if kind == "number" else 0
        # Until draft 4, `exclusiveMinimum` and `exclusiveMaximum` were booleans.
        if isinstance(limit, int | float) and limit is not True and limit is not False and limit + step >= floor:
            yield {"type": kind, beyond: limit + step}


def _other_than(texts: set[str]) -> str | None:
    """Return a regular expression for all texts but these; None if it would be long."""
    if sum(len(text) ** 2 for text in texts) > MAX_PATTERN_CHARACTERS:
        return None
    following: dict[str, set[str]] = {text: set() for text in texts}
    for text in texts:
        for i, character in enumerate(text):
            following.setdefault(text[:i], set()).add(character)
    choices = [re.escape(prefix) for prefix in following if prefix not in texts]
    for prefix, characters in following.items():
        other = f"[^{''.join(map(_in_class, sorted(characters)))}](?s:.)*" if characters else "(?s:.)+"
        choices.append(re.escape(prefix) + other)
    return f"^(?:{'|'.join(sorted(choices))})$"


def _in_class(character: str) -> str:
    return f"\\{character}" if character in "\\]^-[&~" else character
