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
