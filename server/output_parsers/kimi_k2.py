"""``<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}<|tool_call_end|>``: Kimi K2."""

from __future__ import annotations

from collections.abc import Generator

from .base import CallShape, OutputFormat, ParseRequest
from .events import ToolCall
from .json_calls import read_arguments
from .reader import Malformed, Parser, Reader
from .sections import only_text, reasoning, text_and_calls

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
THINK = ("<think>", "</think>")


def parse(reader: Reader, request: ParseRequest) -> Parser:
    """Parse an answer in Kimi K2's format: add its reasoning, text and calls to ``reader.events``.

    Yields whenever it needs more text. Calls are recognised only if the request has tools.
    """
    markers = (SECTION,) if request.tools else ()
    yield from reasoning(reader, request, THINK, calls=markers)
    if not request.tools:
        yield from only_text(reader)
        return

    def read(marker: str) -> Generator[None, None, list[ToolCall]]:
        # What stands between the calls of a section is noise. Calls go out as they are complete.
        while True:
            _, mark = yield from reader.until(CALL, SECTION_END)
            if mark == SECTION_END:
                return []
            name, _ = yield from reader.until(ARGUMENTS)
            name = name.strip().removeprefix("functions.")
            name = name.rpartition(":")[0] or name
            if not name:
                raise Malformed("name")
            yield from read_arguments(reader, name)
            yield from reader.expect(CALL_END)
            reader.complete_call()
            reader.text, reader.at = marker + reader.text, len(marker)

    yield from text_and_calls(reader, markers, read)


SHOWN = (SECTION, SECTION_END, CALL, ARGUMENTS, CALL_END, *THINK)
SHAPE = CallShape(f"{CALL}functions.NAME:0{ARGUMENTS}", CALL_END, SECTION, SECTION_END, has_json_names=False)
KIMI_K2 = OutputFormat("kimi_k2", parse, SHOWN, THINK, ((SECTION,),), SHAPE)
