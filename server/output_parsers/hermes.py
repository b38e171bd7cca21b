"""``<tool_call>{"name": …, "arguments": {…}}</tool_call>``: Hermes, Qwen 2.5 and Qwen 3, and many others."""

from __future__ import annotations

from collections.abc import Generator

from .base import CallShape, OutputFormat, ParseRequest
from .events import ToolCall
from .json_calls import read_call
from .reader import Parser, Reader
from .sections import only_text, reasoning, text_and_calls

BEGIN, END = "<tool_call>", "</tool_call>"
THINK = ("<think>", "</think>")


def parse(reader: Reader, request: ParseRequest) -> Parser:
    """Parse an answer in the Hermes format: add its reasoning, text and calls to ``reader.events``.

    Yields whenever it needs more text. Calls are recognised only if the request has tools.
    """
    markers = (BEGIN,) if request.tools else ()
    yield from reasoning(reader, request, THINK, calls=markers)
    if not request.tools:
        yield from only_text(reader)
        return

    def read(marker: str) -> Generator[None, None, list[ToolCall]]:
        yield from read_call(reader)
        yield from reader.expect(END)
        reader.complete_call()
        return []

    yield from text_and_calls(reader, markers, read)


SHAPE = CallShape(f'{BEGIN}\n{{"name": "NAME", "arguments": ', f"}}\n{END}", separator="\n")
HERMES = OutputFormat(
    "hermes", parse, (BEGIN, END, *THINK), THINK, ((f"{BEGIN} {{", "arguments"), (f"{BEGIN}{{", "arguments")), SHAPE
)
