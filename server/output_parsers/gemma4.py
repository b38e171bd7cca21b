"""``<|tool_call>call:NAME{key:<|"|>text<|"|>,n:1}<tool_call|>``: Gemma 4. Reasoning is a channel named "thought"."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

from .base import OutputFormat, ParseRequest
from .events import ToolCall
from .json_scan import json_text
from .reader import Malformed, Parser, Reader, make_call, parse_json
from .sections import only_text, reasoning, text_and_calls

BEGIN, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
THINK = ("<|channel>thought\n", "<channel|>")
MAX_LEVELS = 100
"""Maximum levels of objects and lists in a call's arguments. Each is a generator of its own."""


def parse(reader: Reader, request: ParseRequest) -> Parser:
    """Parse an answer in Gemma 4's format: add its reasoning, text and calls to ``reader.events``.

    Yields whenever it needs more text. Calls are recognised only if the request has tools.
    """
    markers = (BEGIN,) if request.tools else ()
    yield from reasoning(reader, request, THINK, calls=markers)
    if not request.tools:
        yield from only_text(reader)
        return

    def read(marker: str) -> Generator[None, None, list[ToolCall]]:
        start = reader.at
        try:
            yield from reader.expect("call:")
            name, _ = yield from reader.until("{", END)
            if reader.text[reader.at - 1] != "{" or not name.strip():
                raise Malformed("name")
            arguments = yield from _members(reader)
            yield from reader.expect(END)
        except Malformed:
            reader.at = start
            yield from reader.until(END)
            raise
        return [make_call(name.strip(), json.dumps(arguments, ensure_ascii=False))]

    yield from text_and_calls(reader, markers, read)


def _members(reader: Reader, level: int = 1) -> Generator[None, None, dict[str, Any]]:
    found: dict[str, Any] = {}
    yield from reader.skip_space()
    if (yield from reader.takes("}")):
        return found
    while True:
        yield from reader.skip_space()
        if (yield from reader.takes(QUOTE)):
            key, _ = yield from reader.until(QUOTE)
            yield from reader.expect(":")
        else:
            key, _ = yield from reader.until(":")
        found[key.strip()] = yield from _value(reader, level)
        if (yield from reader.expect(",", "}")) == "}":
            return found


def _value(reader: Reader, level: int) -> Generator[None, None, Any]:
    """Read a value inside ``level`` objects and lists. Raises ``Malformed`` for more than ``MAX_LEVELS``."""
    if level > MAX_LEVELS:
        raise Malformed("levels")
    yield from reader.skip_space()
    mark = yield from reader.takes(QUOTE, "{", "[", '"')
    if mark == QUOTE:
        return (yield from reader.until(QUOTE))[0]
    if mark == "{":
        return (yield from _members(reader, level + 1))
    if mark == '"':
        reader.at -= 1
        return parse_json((yield from json_text(reader)))
    if mark == "[":
        items: list[Any] = []
        yield from reader.skip_space()
        if (yield from reader.takes("]")):
            return items
        while True:
            items.append((yield from _value(reader, level + 1)))
            if (yield from reader.expect(",", "]")) == "]":
                return items
    bare, end = yield from reader.until(",", "}", "]")
    reader.at -= len(end)
    try:
        return parse_json(bare)
    except Malformed:
        return bare.strip()


GEMMA4 = OutputFormat("gemma4", parse, (BEGIN, END, QUOTE, "<|channel>", "<channel|>"), THINK, ((BEGIN,),))
