"""``[TOOL_CALLS]``, then ``[{"name": …, "arguments": {…}}]`` or ``NAME[ARGS]{…}``: Mistral, all versions.

Reasoning stands between ``[THINK]`` and ``[/THINK]``.
"""

from __future__ import annotations

from collections.abc import Generator

from .base import CallShape, OutputFormat, ParseRequest
from .events import ToolCall
from .json_calls import read_arguments, read_calls
from .reader import Malformed, Parser, Reader
from .sections import only_text, reasoning, text_and_calls

BEGIN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
THINK = ("[THINK]", "[/THINK]")


def parse(reader: Reader, request: ParseRequest) -> Parser:
    """Parse an answer in Mistral's format: add its reasoning, text and calls to ``reader.events``.

    Yields whenever it needs more text. Calls are recognised only if the request has tools.
    """
    markers = (BEGIN,) if request.tools else ()
    yield from reasoning(reader, request, THINK, ("<think>", "</think>"), calls=markers)
    if not request.tools:
        yield from only_text(reader)
        return

    def read(marker: str) -> Generator[None, None, list[ToolCall]]:
        yield from reader.skip_space()
        if (yield from reader.sees("[", "{")):
            yield from read_calls(reader)
            return []
        name, mark = yield from reader.until(ARGS, CALL_ID, "{")
        if mark == CALL_ID:
            _, mark = yield from reader.until(ARGS, "{")
        reader.at -= mark == "{"
        if not name.strip() or any(c in name for c in "[\"'\n "):
            raise Malformed("name")
        yield from read_arguments(reader, name.strip())
        reader.complete_call()
        return []

    yield from text_and_calls(reader, markers, read)


SHAPE = CallShape('{"name": "NAME", "arguments": ', "}", f"{BEGIN}[", "]", ", ")
MISTRAL = OutputFormat("mistral", parse, (BEGIN, ARGS, CALL_ID, *THINK), THINK, (("[TOOL_CALLS]",),), SHAPE)
