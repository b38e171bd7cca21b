"""Formats of strings: what the patterns match is valid, and what they leave alone."""

from __future__ import annotations

import json

import numpy as np
import pytest

from pdserve.messages.grammar import Grammar
from pdserve.model_files.grammar.formats import EXACT, PATTERNS, with_exact_formats
from pdserve.model_files.options import ModelOptions
from pdserve.model_files.text.load import load_tokenizer
from pdserve.model_runner.grammar.matchers import Matchers

OPTIONS = ModelOptions(model_path="smollm2")


@pytest.fixture(scope="module")
def accepts():
    tokenizer, matchers = load_tokenizer(OPTIONS), Matchers(OPTIONS, 49152)

    def accepted(schema: dict, value: object) -> bool:
        (tokens,) = tokenizer.encode_batch([json.dumps(value, ensure_ascii=False)], add_special_tokens=False)
        matcher = matchers.compile(Grammar("json_schema", json.dumps(schema))).deep_copy()
        assert not matcher.is_error()
        return matcher.try_consume_tokens(np.array(tokens).tolist()) == len(tokens) and matcher.is_accepting()

    return accepted


@pytest.mark.parametrize(
    ("name", "valid", "invalid"),
    [
        ("date", ["2024-02-29", "2000-02-29", "2023-12-31"], ["2023-02-29", "1900-02-29", "2023-04-31", "2023-13-01"]),
        ("time", ["23:59:59Z", "00:00:00.5+01:00"], ["24:00:00Z", "12:00:60Z", "12:00:00"]),
        ("date-time", ["2024-02-29T23:59:59Z"], ["2023-02-29T00:00:00Z", "2024-01-01 00:00:00Z"]),
        ("hostname", ["a.b-c.example"], ["-a", "a..b", "xn--x", "a" * 64]),
        ("uri-reference", ["/a/b", "https://a.b/c"], ["\\\\a", "a b"]),
        ("json-pointer", ["", "/a~0b/~1"], ["a", "/~2"]),
        ("relative-json-pointer", ["0#", "12/a"], ["01", "-1"]),
        ("regex", ["abc"], ["(a"]),
        ("uri-template", ["/a/{b}"], ["{a", "{}"]),
        ("idn-email", ["a.b@c.de"], ["@c", "a@"]),
    ],
)  # fmt: skip
def test_patterns_match_valid_strings_alone(name: str, valid: list[str], invalid: list[str], accepts) -> None:
    schema = {"type": "string", "format": name}
    assert all(accepts(schema, value) for value in valid)
    assert not any(accepts(schema, value) for value in invalid)


def test_formats_are_replaced_in_every_schema_and_nowhere_else() -> None:
    date = {"format": "date"}
    exact = with_exact_formats(date)
    assert exact == {"pattern": f"^(?:{PATTERNS['date']})$"}
    schema = {
        "properties": {"a": date, "format": date},
        "items": [date],
        "prefixItems": [date],
        "anyOf": [date, {"not": date}],
        "$defs": {"d": date},
        "additionalProperties": date,
        "enum": [date],
        "default": date,
        "const": date,
    }
    assert with_exact_formats(schema) == {
        "properties": {"a": exact, "format": exact},
        "items": [exact],
        "prefixItems": [exact],
        "anyOf": [exact, {"not": exact}],
        "$defs": {"d": exact},
        "additionalProperties": exact,
        "enum": [date],
        "default": date,
        "const": date,
    }


def test_a_format_beside_a_pattern_keeps_both(accepts) -> None:
    schema = {"type": "string", "format": "date", "pattern": "^2024"}
    assert accepts(schema, "2024-02-29")
    assert not accepts(schema, "2023-02-28")
    assert not accepts(schema, "2024-x")
    assert with_exact_formats({**schema, "$defs": {"a": {}}})["$defs"] == {"a": {}}


def test_unknown_formats_are_left_out_and_exact_ones_kept() -> None:
    assert with_exact_formats({"format": "phone", "type": "string"}) == {"type": "string"}
    for name in EXACT:
        assert with_exact_formats({"format": name}) == {"format": name}
    assert with_exact_formats({"properties": {"format": True}}) == {"properties": {"format": True}}
    assert with_exact_formats(True) is True


def test_white_space_is_that_of_ecma(accepts) -> None:
    schema = {"type": "string", "pattern": "^\\S+$"}
    assert accepts(schema, "ab")
    assert not accepts(schema, "a\ufeff")
    assert with_exact_formats({"pattern": "[\\S]\\\\S"}) == {"pattern": "[\\S]\\\\S"}
