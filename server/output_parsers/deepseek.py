"""The formats of DeepSeek V3 and V3.1, between ``<｜tool▁calls▁begin｜>`` and ``<｜tool▁calls▁end｜>``.

V3 and R1 write ``function<｜tool▁sep｜>NAME`` and the arguments in a fence of Markdown; V3.1 writes
``NAME<｜tool▁sep｜>{…}``.
"""

from __future__ import annotations

from collections.abc import Generator

from .base import OutputFormat, ParseRequest
from .events import ToolCall
from .json_calls import read_arguments
from .reader import Malformed, Parser, Reader
from .sections import only_text, reasoning, text_and_calls

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
FENCE = "```"
THINK = ("<think>", "</think>")


def parse(reader: Reader, request: ParseRequest) -> Parser:
    """Parse an answer in DeepSeek V3's format: add its reasoning, text and calls to ``reader.events``.

    Yields whenever it needs more text. Calls are recognised only if the request has tools.
    """
    markers = (CALLS, CALL, CALLS_END) if request.tools else ()
    yield from reasoning(reader, request, THINK, calls=markers[:1])
    if not request.tools:
        yield from only_text(reader)
        return

    def read(marker: str) -> Generator[None, None, list[ToolCall]]:
        if marker == CALLS_END:
            return []
        if marker == CALLS:
            yield from reader.skip_space()
            if not (yield from reader.sees(CALL)):
                yield from reader.until(CALLS_END)
                raise Malformed(CALL)
            return []
        first, _ = yield from reader.until(SEPARATOR)
        if first.strip() == "function":
            name, mark = yield from reader.until("\n", FENCE, "{")
            reader.at -= len(mark)
            yield from reader.skip_space()
            if (yield from reader.takes(FENCE)):
                yield from reader.takes("json")
        else:
            name = first
        name = name.strip()
        if not name or "\n" in name or "<" in name:
            raise Malformed("name")
        after = reader.at
        try:
            yield from read_arguments(reader, name)
            yield from reader.skip_space()
            yield from reader.takes(FENCE)
            yield from reader.expect(CALL_END)
        except Malformed:
            if reader.call is not None and reader.call.told_as is not None:
                raise
            reader.at = after
            yield from reader.until(CALL_END)
            raise Malformed("arguments") from None
        reader.complete_call()
        return []

    yield from text_and_calls(reader, markers, read)


SHOWN = (CALLS, CALLS_END, CALL, CALL_END, SEPARATOR, *THINK)
DEEPSEEK = OutputFormat("deepseek_v3", parse, SHOWN, THINK, ((CALLS, SEPARATOR),))
