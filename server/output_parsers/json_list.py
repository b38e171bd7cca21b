"""A marker, then a JSON list of calls: Granite 3 and Phi-4. Phi-4 ends the list with ``<|/tool_call|>``."""

from __future__ import annotations

from collections.abc import Generator

from .base import CallShape, OutputFormat, ParseRequest
from .events import ToolCall
from .json_calls import read_calls
from .reader import Malformed, Parser, Reader
from .sections import reasoning, text_and_calls

MARKS = (("<|tool_call|>", "<|/tool_call|>"), ("<tool_call>", "</tool_call>"), ("functools", ""))
THINK = ("<think>", "</think>")
OLD_THINK = ("Here is my thought process:", "Here is my response:")
RESPONSE, RESPONSE_END = "<response>", "</response>"


def parse(reader: Reader, request: ParseRequest) -> Parser:
    """Parse an answer in the format of Granite 3 or Phi-4: add its reasoning, text and calls to ``reader.events``.

    Yields whenever it needs more text. Calls are recognised only if the request has tools.
    """
    markers = tuple(begin for begin, _ in MARKS) if request.tools else ()
    yield from reasoning(reader, request, THINK, OLD_THINK, calls=markers[:2])
    yield from reader.skip_space()
    reader.at = len(RESPONSE) + reader.at if (yield from reader.sees(RESPONSE)) else 0
    reader.drop_read()

    def read(marker: str) -> Generator[None, None, list[ToolCall]]:
        if marker == RESPONSE_END:
            return []
        if not (yield from read_calls(reader)):
            raise Malformed("calls")
        after = reader.at
        yield from reader.skip_space()
        if not (end := dict(MARKS)[marker]) or not (yield from reader.takes(end)):
            reader.at = after
        return []

    if request.tools:
        yield from text_and_calls(reader, (*markers, RESPONSE_END), read)
    else:
        yield from text_and_calls(reader, (RESPONSE_END,), read)


SHOWN = ("<|tool_call|>", "<|/tool_call|>", "<tool_call>", "</tool_call>", *THINK, RESPONSE, RESPONSE_END)
_LISTED = ('{"name": "NAME", "arguments": ', "}")
GRANITE = OutputFormat(
    "granite", parse, SHOWN, THINK, (("<|start_of_role|>",),), CallShape(*_LISTED, "<|tool_call|>[", "]", ", ")
)
PHI4 = OutputFormat(
    "phi4",
    parse,
    SHOWN,
    THINK,
    (("<|tool|>",), ("functools[",)),
    CallShape(*_LISTED, "<|tool_call|>[", "]<|/tool_call|>", ", "),
)
