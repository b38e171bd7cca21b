"""Rewritten schemas: whatever they accept, the original accepts. Judge: the jsonschema library."""

from __future__ import annotations

import random
from typing import Any

import jsonschema
import pytest

from pdserve.messages.grammar import Grammar
from pdserve.model_files.grammar.errors import GrammarError
from pdserve.model_files.grammar.limited_check import LimitedCheck
from pdserve.model_files.grammar.rewrites import Rewriter

NAMES = ["a", "b", "c"]
VALUES: list[Any] = [None, True, 0, 1, 2.5, "", "x", "ab", [], [1], [0, 0], ["x", 1], {}]
KEYWORDS = ["required", "properties", "not", "anyOf", "oneOf", "if", "dependencies", "names", "counts", "items"]
KEYWORDS += ["contains", "additionalProperties"]
TYPES = ["array", "boolean", "null", "number", "integer", "object", "string"]
UNSERVED = {"not", "if", "then", "else", "oneOf", "dependencies", "dependentRequired", "propertyNames", "uniqueItems"}
LIMITS = [f"{end}{of}" for end in ("min", "max") for of in ("imum", "Length", "Items", "Properties")]


def valid(schema: Any, value: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def instance(rng: random.Random, depth: int = 2) -> Any:
    if depth and rng.random() < 0.6:
        return {name: instance(rng, depth - 1) for name in rng.sample(NAMES, rng.randint(0, 3))}
    return rng.choice(VALUES)


def schema(rng: random.Random, depth: int = 3) -> Any:
    """Return a random schema with the keywords that are rewritten."""
    if not depth or rng.random() < 0.2:
        kinds: list[Any] = [{}, {"const": rng.choice(VALUES)}, {"enum": rng.sample(VALUES, 3)}, {"minimum": 1}]
        kinds += [{rng.choice(LIMITS): rng.randint(0, 2)}, {"exclusiveMinimum": 1}, {"exclusiveMaximum": 1}]
        return rng.choice([*kinds, {"type": rng.choice(TYPES)}, {"type": rng.sample(TYPES, 2)}, True, False])
    made: dict[str, Any] = {}
    if rng.random() < 0.5:
        made["type"] = rng.choice(["object", rng.choice(TYPES)])
    for keyword in rng.sample(KEYWORDS, 3):
        inner = [schema(rng, depth - 1) for _ in range(2)]
        if keyword == "required":
            made["required"] = rng.sample(NAMES, rng.randint(1, 2))
        elif keyword == "properties":
            made["properties"] = dict(zip(rng.sample(NAMES, 2), inner, strict=True))
        elif keyword == "counts":
            made[rng.choice(["minProperties", "maxProperties"])] = rng.randint(0, 2)
        elif keyword == "items":
            made |= {"items": rng.choice([inner[0], {"enum": rng.sample(VALUES, 2)}]), "uniqueItems": True}
            made |= {} if rng.random() < 0.5 else {"maxItems": rng.randint(0, 2)}
        elif keyword in ("not", "contains", "additionalProperties"):
            made[keyword] = inner[0]
        elif keyword == "if":
            made |= {"if": inner[0], "then": inner[1]} | ({"else": schema(rng, 0)} if rng.random() < 0.5 else {})
        elif keyword == "dependencies":
            made["dependentRequired"] = {rng.choice(NAMES): [rng.choice(NAMES)]}
        elif keyword == "names":
            made["propertyNames"] = rng.choice([True, {"type": "string"}, {"pattern": "^[ab]"}])
        else:
            made[keyword] = inner
    return made


def keywords(schema: Any) -> set[str]:
    """Return all keywords within a schema. No property here is named like one."""
    if isinstance(schema, dict):
        return {*schema, *(key for value in schema.values() for key in keywords(value))}
    return {key for value in schema for key in keywords(value)} if isinstance(schema, list) else set()


def test_rewritten_schemas_accept_nothing_that_the_original_refuses() -> None:
    rng = random.Random(1)
    accepted = rewritten_whole = 0
    for _ in range(600):
        original = schema(rng)
        if not isinstance(original, dict):
            continue
        rewritten = Rewriter(original).rewritten()
        rewritten_whole += bool(keywords(original) & UNSERVED) and not keywords(rewritten) & UNSERVED
        narrowest = Rewriter(original, narrowest=True).rewritten()
        for value in [instance(rng) for _ in range(12)]:
            for made in (rewritten, narrowest):
                if valid(made, value):
                    accepted += 1
                    assert valid(original, value), (original, made, value)
    assert accepted > 400
    assert rewritten_whole > 40


@pytest.mark.parametrize(
    ("original", "value"),
    [
        ({"oneOf": [{"required": ["a"], "type": "object"}, {"required": ["b"], "type": "object"}]}, {"a": 1}),
        ({"type": "object", "not": {"required": ["a"]}}, {"b": 1}),
        ({"type": "object", "not": {"required": ["a", "b"]}}, {"a": 1}),
        ({"not": {"type": "string"}}, 1),
        ({"not": {"not": {"type": "string"}}}, "x"),
        ({"dependencies": {"a": ["b"]}}, {"a": 1, "b": 2}),
        ({"dependencies": {"a": {"required": ["b"]}}}, {"b": 2}),
        (
            {"if": {"properties": {"a": {"const": 1}}, "required": ["a"]}, "then": {"required": ["b"]}},
            {"a": "x"},
        ),
        ({"propertyNames": {"pattern": "^a"}, "additionalProperties": {"type": "number"}}, {"ab": 1}),
        ({"then": {"type": "string"}}, 1),
        ({"type": "string", "not": {"enum": ["ab", "a", "b"]}}, "abc"),
        ({"type": "string", "not": {"const": ""}}, "x"),
        ({"type": "string", "not": {"minLength": 3}}, "ab"),
        ({"type": "number", "not": {"const": 3}}, 4),
        ({"type": "number", "not": {"minimum": 3}}, 2),
        ({"type": "array", "not": {"items": {"type": "string"}}}, [1]),
        ({"type": "array", "contains": {"type": "string"}}, ["x", 1]),
        ({"type": "array", "contains": {"type": "string"}, "minContains": 2, "items": {"maxLength": 2}}, ["x", "y", 1]),
        ({"uniqueItems": True, "items": {"enum": [1, 2, 3]}, "minItems": 2}, [3, 1]),
        ({"uniqueItems": True, "items": {"enum": list(range(9))}}, [0, 3, 8]),
        ({"uniqueItems": True, "items": {"type": "boolean"}}, [True, False]),
        ({"uniqueItems": True, "maxItems": 1}, ["x"]),
        ({"properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2}, {"a": 1, "c": 1}),
        ({"properties": {"a": {}, "b": {}, "c": {}}, "maxProperties": 2}, {"a": 1, "c": 1}),
        ({"oneOf": [{"type": "string"}, {"type": "string", "pattern": "^a"}, {"type": "number"}]}, 1),
        ({"propertyNames": {"enum": ["a", "b.c"]}}, {"b.c": 1}),
        ({"$defs": {"o": {"required": ["a"]}}, "type": "object", "not": {"$ref": "#/$defs/o"}}, {}),
    ],
)
def test_what_is_rewritten_still_accepts_what_it_is_for(original: dict[str, Any], value: Any) -> None:
    rewritten = Rewriter(original, narrowest="oneOf" in original).rewritten()
    assert not keywords(rewritten) & UNSERVED
    assert valid(original, value)
    assert valid(rewritten, value)


def test_a_schema_that_can_be_used_is_left_alone() -> None:
    for original in ({"type": "object", "properties": {"not": {"type": "string"}}}, {"const": {"not": {}}}, {}):
        assert Rewriter(original).rewritten() == original


def test_what_cannot_be_rewritten_is_refused_by_its_keyword() -> None:
    checks = LimitedCheck()
    with pytest.raises(GrammarError, match="not"):
        checks.check(Grammar("json_schema", '{"type": "string", "not": {"pattern": "a"}}'))
    checks.close()


def test_a_cycle_of_references_ends() -> None:
    original = {"$defs": {"a": {"not": {"$ref": "#/$defs/a"}}}, "not": {"$ref": "#/$defs/a"}}
    assert Rewriter(original).rewritten() is not None
