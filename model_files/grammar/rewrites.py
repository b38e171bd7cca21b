"""Keywords of JSON schemas that llguidance lacks, in terms of those that it has.

A rewritten schema accepts nothing that the original refuses, but may refuse some of what it accepts: it says what the
model may write. Where the complement of a schema is needed, as for ``not``, a part of it will do. A keyword that cannot
be rewritten stays, and llguidance refuses it by its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations, islice, permutations
from math import comb
from typing import Any

from .complements import TYPES, Complements, listed_values, required_names, without
from .errors import GrammarError
from .schema_walk import change_all

MAX_CHOICES = 64
"""Choices of a `oneOf`, or ways to choose properties, that are looked at."""
MAX_PARTS = 3
"""Parts of a complement that are used. Each of them multiplies the size of a schema."""
MAX_ARRAYS = 512
"""Arrays without repetition that are listed."""
OTHER_THAN_ARRAYS = [name for name in TYPES if name != "array"]
EXACT = frozenset({"oneOf", "not", "if"})
"""Keywords with schemas that must not become narrower where the keyword stays."""


class Rewriter:
    """Rewrites one schema. References are resolved in its ``root``.

    ``narrowest``: whether the result is to be small. Choices of `oneOf` may be left out then.
    """

    def __init__(self, root: dict[str, Any], narrowest: bool = False) -> None:
        self._root = root
        self._narrowest = narrowest
        self._complements = Complements(root, 1 if narrowest else MAX_PARTS)

    def rewritten(self) -> Any:
        """Return a copy of the schema, with keywords that llguidance lacks replaced by others where that works."""
        return change_all(self._root, self._rewrite, EXACT)

    def _rewrite(self, schema: dict[str, Any]) -> Any:
        made, also = dict(schema), list[Any]()
        for rewrite in (self._not, self._dependencies, self._condition, self._one_of, _unique_items, _count_properties):
            also += rewrite(made)
        if self._complements.has_prefixes:
            _contains(made)
        self._name_properties(made)
        if not also:
            return made
        return made | {"allOf": [*made.get("allOf", ()), *also]}

    def _not(self, made: dict[str, Any]) -> Iterator[Any]:
        if "not" in made and (other := self._complements.outside_within(made["not"], made)) is not None:
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
        elif (other := self._complements.outside_within(made["if"], made)) is not None:
            condition, then, otherwise = made.pop("if"), made.pop("then", True), made.pop("else", True)
            yield {"anyOf": [{"allOf": [condition, then]}, {"allOf": [other, otherwise]}]}

    def _one_of(self, made: dict[str, Any]) -> Iterator[Any]:
        choices = made.get("oneOf")
        if not isinstance(choices, list) or len(choices) > MAX_CHOICES:
            return
        # Choices may be disjoint by what is said beside them.
        kind = {"type": made["type"]} if "type" in made else {}
        whole = [kind | {"allOf": [choice]} for choice in choices]
        alone, is_whole = [], True
        for i, choice in enumerate(choices):
            others = [
                two
                for j, two in enumerate(choices)
                if j != i and not self._complements.are_disjoint(whole[i], whole[j])
            ]
            outside = [self._complements.outside_within(other, whole[i]) for other in others]
            is_whole &= None not in outside
            if None not in outside and False not in outside:
                alone.append({"allOf": [choice, *outside]} if outside else choice)
        # Where it stays, llguidance must not compare what references name: that may have become narrower.
        if is_whole or (alone and (self._narrowest or _has_references(choices))):
            del made["oneOf"]
            yield {"anyOf": alone} if alone else False
        elif _has_references(choices):
            raise GrammarError("json_schema: choices of oneOf may overlap, which is not supported; use anyOf")

    def _name_properties(self, made: dict[str, Any]) -> None:
        """Rewrite in ``made`` those `propertyNames` that allow any name, listed ones, or names by a pattern.

        Others stay, and llguidance refuses them.
        """
        names = made.get("propertyNames")
        if isinstance(names, dict) and "$ref" in names:
            names = self._complements.resolve(names["$ref"])
        if names is True or names in ({}, {"type": "string"}):
            del made["propertyNames"]
        elif (pattern := _pattern_of(names)) and not made.keys() & {"properties", "patternProperties"}:
            del made["propertyNames"]
            made["patternProperties"] = {pattern: made.get("additionalProperties", True)}
            made["additionalProperties"] = False


def _has_references(schemas: Any) -> bool:
    return '"$ref"' in json.dumps(schemas)


def _pattern_of(names: Any) -> str | None:
    """Return a pattern of the names that a schema of `propertyNames` allows; None if none is found."""
    if not isinstance(names, dict):
        return None
    if (texts := listed_values(names)) and all(isinstance(text, str) for text in texts):
        return f"^(?:{'|'.join(map(re.escape, texts))})$"
    return names["pattern"] if names.keys() - {"type", "description"} == {"pattern"} else None


def _unique_items(made: dict[str, Any]) -> Iterator[Any]:
    """Remove `uniqueItems` from ``made`` if its arrays hold one item at most, or few values.

    Yields the schema that has to hold in its place, if one is needed. In other cases the keyword stays.
    """
    if made.get("uniqueItems") is not True:
        return
    least, most = made.get("minItems", 0), made.get("maxItems", MAX_ARRAYS)
    if most <= 1:
        del made["uniqueItems"]
    elif (arrays := _arrays(made.get("items"), most)) and not made.keys() & {"prefixItems", "contains"}:
        del made["uniqueItems"]
        yield {"anyOf": [{"type": OTHER_THAN_ARRAYS}, {"enum": [array for array in arrays if len(array) >= least]}]}


def _arrays(items: Any, most: int) -> list[list[Any]]:
    """Return arrays without repetition of up to ``most`` of the values that schema ``items`` lists.

    They come in any order or, if these are too many, in one. [] if ``items`` lists no values, or too many.
    """
    values = listed_values(items) if isinstance(items, dict) else None
    if values is None and isinstance(items, dict) and items.get("type") == "boolean":
        values = [False, True]
    if values is None or len(values) > MAX_ARRAYS or any(value in values[:i] for i, value in enumerate(values)):
        return []
    for arrays in (permutations, combinations):
        sizes = range(min(most, len(values)) + 1)
        found = list(islice((list(array) for size in sizes for array in arrays(values, size)), MAX_ARRAYS + 1))
        if len(found) <= MAX_ARRAYS:
            return found
    return []


def _count_properties(made: dict[str, Any]) -> Iterator[Any]:
    """Replace limits of the number of properties in ``made`` by the choices of its named, optional properties.

    Yields the schemas that have to hold in their place. A limit with too many choices stays.
    """
    names, needed = list(made.get("properties", {})), required_names(made)
    optional = [name for name in names if name not in needed]
    least, most = (made.get(keyword) for keyword in ("minProperties", "maxProperties"))
    if least is not None and (least <= len(needed) or _has_choices(optional, least - len(needed))):
        del made["minProperties"]
        if least > len(needed):
            yield {"anyOf": [{"required": list(some)} for some in combinations(optional, least - len(needed))]}
    if most is not None and optional and "patternProperties" not in made:
        room = min(len(optional), max(0, most - len(needed)))
        if most >= len(needed) and _has_choices(optional, room):
            del made["maxProperties"]
            made["additionalProperties"] = False
            left = [set(optional) - set(some) for some in combinations(optional, room)]
            yield {"anyOf": [{"properties": dict.fromkeys(sorted(names), False)} for names in left]}


def _has_choices(names: list[str], count: int) -> bool:
    """Return whether ``count`` of ``names`` can be chosen in few ways."""
    return 0 < comb(len(names), count) <= MAX_CHOICES


def _contains(made: dict[str, Any]) -> None:
    """Replace `contains` in ``made``: its first items have to match, as many as `minContains` says.

    The keyword stays beside `maxContains`, and if it asks for many items.
    """
    least = made.get("minContains", 1)
    if "contains" not in made or "maxContains" in made or isinstance(made.get("items"), list) or least > MAX_CHOICES:
        return
    contained, items, prefix = made.pop("contains"), made.get("items", True), list(made.get("prefixItems", ()))
    made.pop("minContains", None)
    prefix += [items] * (least - len(prefix))
    made["prefixItems"] = [{"allOf": [one, contained]} for one in prefix[:least]] + prefix[least:]
    made["minItems"] = max(made.get("minItems", 0), least)
