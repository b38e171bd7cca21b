"""What ``tool_choice`` forces is what the parser of the same format reads back: random texts of each forced grammar."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from pdserve.model_files.grammar.lowering import lower
from pdserve.server.output_parsers.base import OutputFormat, OutputParser, ParseRequest
from pdserve.server.output_parsers.events import ToolCall
from pdserve.server.output_parsers.forced import forced_calls
from pdserve.server.output_parsers.registry import FORMATS

FORCED = [one for one in FORMATS if one.shape is not None]
BYTES = LLTokenizer("byte")
NAMES = ("get_weather", "a.b-c/d", "größe", 'q"uo\\te', "a b", "x:1", "<f>", "[x]", "NAME", "functions.f", "名前")
SCHEMAS: tuple[dict[str, Any], ...] = (
    {},
    {"properties": {"y": {"type": "string"}}},
    {"type": "object", "properties": {}, "additionalProperties": False},
    {"type": ["object", "null"], "properties": {"d": {"type": "string", "format": "date"}}},
    {"anyOf": [{"type": "object", "properties": {"x": {"type": "integer"}}}, {"type": "string"}]},
    {"enum": [{"a": 1}]},
    {
        "properties": {"x": {"$ref": "#/$defs/b"}},
        "required": ["x"],
        "$defs": {"b": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 2}},
    },
    {
        "$ref": "#/$defs/o",
        "$defs": {
            "o": {
                "type": "object",
                "properties": {"z": {"enum": ["</tool_call>", "[/x]", "<|tool_call_end|>"]}},
                "required": ["z"],
            }
        },
    },
)
SHORT = 60
"""Bytes after which a random text is brought to its end."""


def random_text(grammar: str, rng: random.Random) -> str:
    """Return a random text of a grammar."""
    matcher, text = LLMatcher(BYTES, grammar, log_level=0), bytearray()
    while True:
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, count=BYTES.vocab_size, bitorder="little")).tolist()
        assert allowed, f"{matcher.get_error()[:300]} after {text!r}"
        hurries = len(text) > SHORT or rng.random() < 0.3
        if BYTES.eos_token in allowed and (hurries or len(allowed) == 1):
            return text.decode()
        ends = [token for token in allowed if token < 256 and chr(token) in '"}],:']
        plain = [token for token in allowed if 32 <= token < 127]
        choice = (ends if hurries else []) or (plain if rng.random() < 0.8 else []) or allowed
        token = rng.choice([token for token in choice if token != BYTES.eos_token])
        assert matcher.consume_token(token)
        text.append(token)


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("output_format", FORCED, ids=lambda one: one.name)
def test_forced_calls_are_read_back(output_format: OutputFormat, seed: int) -> None:
    rng = random.Random(seed)
    tools = {name: rng.choice(SCHEMAS) for name in rng.sample(NAMES, rng.randint(1, 3))}
    grammar = forced_calls(output_format, tools, many=rng.random() < 0.5)
    assert grammar is not None
    text = random_text(lower(grammar), rng)
    for size in (3, len(text)):
        parser = OutputParser(output_format, ParseRequest(tools))
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        events = [event for piece in pieces for event in parser.feed(piece)] + parser.end()
        assert events, text
        for event in events:
            assert isinstance(event, ToolCall), text
            assert event.name in tools, text
            arguments = json.loads(event.arguments)
            assert isinstance(arguments, dict), text
            jsonschema.validate(arguments, tools[event.name])
