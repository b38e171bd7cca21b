"""Schemas mean the same wherever a client gives them: alone, in a structural tag, and as a tool's parameters."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from pdserve.messages.grammar import Grammar
from pdserve.model_files.grammar.lowering import lower

BYTES = LLTokenizer("byte")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "d": {"type": "string", "format": "date"}},
    "required": ["a"],
}
CALL = {"before": "(", "schema": SCHEMA, "after": ")"}
CALLS = {"marks": [], "prefix": "", "suffix": "", "separator": "", "many": False, "calls": [CALL]}
TAGS = {"structures": [{"begin": "(", "schema": SCHEMA, "end": ")"}], "triggers": ["("]}
TEXT_TAGS = {"structures": [{"begin": "(", "schema": json.dumps(SCHEMA), "end": ")"}], "triggers": ["("]}
PLACES = [
    (Grammar("json_schema", json.dumps(SCHEMA)), "", ""),
    (Grammar("tool_calls", json.dumps(CALLS)), "(", ")"),
    (Grammar("structural_tag", json.dumps(TAGS)), "(", ")"),
    (Grammar("structural_tag", json.dumps(TEXT_TAGS)), "(", ")"),
]


def accepts(grammar: Grammar, text: str) -> bool:
    """Return whether ``text`` is a complete output."""
    matcher = LLMatcher(BYTES, lower(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(("grammar", "begin", "end"), PLACES)
@pytest.mark.parametrize(
    ("value", "is_valid"),
    [
        ('{"a": 1}', True),
        ('{"a": 1, "d": "2024-02-29", "é": "\\n\\"\\\\"}', True),
        # A parser takes the last of two values of a name.
        ('{"a": 1, "a": "x"}', False),
        ('{"a": 1, "\\u0061": "x"}', False),
        ('{"a": 1, "d": "2023-02-29"}', False),
        ('{"a": 1, "b": "\\ud800"}', False),
        (f'{{"a":{" " * 40}1}}', True),
        (f'{{"a":{" " * 41}1}}', False),
    ],
)
def test_a_schema_holds_everywhere(grammar: Grammar, begin: str, end: str, value: str, is_valid: bool) -> None:
    assert accepts(grammar, begin + value + end) is is_valid


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        # A name that is written twice counts once.
        ({"type": "object", "required": ["a"], "minProperties": 2}, '{"a":1,"b":1}', '{"a":1,"a":1}'),
        ({"properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2}, '{"a":1,"c":1}', '{"a":1,"x":1,"x":1}'),
        ({"properties": {"a": {}, "b": {}}, "maxProperties": 1}, '{"b":1}', '{"a":1,"b":1}'),
        ({"type": "array", "contains": {"const": 5}}, "[5, 1]", "[1]"),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "not": {"const": "ab"}}, '"abc"', '"ab"'),
        ({"items": {"enum": ["a", "bb"], "maxLength": 1}, "uniqueItems": True}, '["a"]', '["bb"]'),
        ({"items": {"enum": ["a", "b"]}, "uniqueItems": True, "minItems": 2}, '["b", "a"]', '["a", "a"]'),
        ({"items": {"enum": list("abcdef")}, "uniqueItems": True}, '["a", "c", "f"]', '["a", "c", "a"]'),
        pytest.param(
            {"items": {"enum": list("abcdefgh")}, "uniqueItems": True},
            '["a", "c", "h"]',
            '["a", "c", "a"]',
            marks=pytest.mark.slow,
        ),
        ({"type": "string", "not": {"enum": ["a", "a]b", "^"]}}, '"a]"', '"a]b"'),
        (
            {
                "type": "object",
                "oneOf": [{"properties": {name: {}}, "additionalProperties": False} for name in ("a", "b")],
            },
            '{"b":1}',
            "{}",
        ),
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object"}, '{"b":1}', '{"b":1,"a":1}'),
    ],
)
def test_rewritten_keywords_hold(schema: dict[str, Any], valid: str, invalid: str) -> None:
    grammar = Grammar("json_schema", json.dumps(schema))
    assert accepts(grammar, valid)
    assert not accepts(grammar, invalid)


def test_a_oneof_of_references_is_not_compared_by_what_is_left_of_them() -> None:
    # What is left of the first choice begins with 5, so it is disjoint from the second one. The original is not.
    schema = {
        "$defs": {
            "a": {"type": "array", "contains": {"const": 5}},
            "b": {"prefixItems": [{"const": 1}], "minItems": 1},
        },
        "properties": {"x": {"type": "array", "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}},
    }
    grammar = Grammar("json_schema", json.dumps(schema))
    assert not accepts(grammar, '{"x": [1, 5]}')
    assert accepts(grammar, '{"x": [1, 2]}')
