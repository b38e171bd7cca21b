"""``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``: Qwen3-Coder and Qwen 3.5.

Values are bare text, so the tool's schema says what they are. Models leave out ``<tool_call>`` at times, and the
end of a parameter.
"""

from __future__ import annotations

import json
from collections.abc import Generator

from .base import OutputFormat, ParseRequest
from .events import ToolCall
from .reader import Malformed, Parser, Reader, make_call
from .schema_types import parameter, properties_of, to_json
from .sections import only_text, reasoning, text_and_calls

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
MAX_UNENDED = 128
"""Maximum beginnings of other parameters to look for, in case a model forgets the end of a value."""
VALUE_ENDS = (
    *(f"{PARAMETER_END}{space}{after}" for space in ("", "\n") for after in (PARAMETER, FUNCTION_END)),
    # Models forget to end the last value.
    *(f"\n{FUNCTION_END}{space}{END}" for space in ("", "\n")),
)
THINK = ("<think>", "</think>")


def parse(reader: Reader, request: ParseRequest) -> Parser:
    """Parse an answer in Qwen3-Coder's format: add its reasoning, text and calls to ``reader.events``.

    Yields whenever it needs more text. Calls are recognised only if the request has tools.
    """
    markers = (BEGIN, FUNCTION) if request.tools else ()
    yield from reasoning(reader, request, THINK, calls=markers[:1])
    if not request.tools:
        yield from only_text(reader)
        return

    def read(marker: str) -> Generator[None, None, list[ToolCall]]:
        if marker == BEGIN:
            yield from reader.expect(FUNCTION)
        call = yield from _function(reader, request)
        after = reader.at
        try:
            yield from reader.expect(END)
        except Malformed:
            if marker == BEGIN:
                raise
            reader.at = after
        return [call]

    yield from text_and_calls(reader, markers, read)


def _function(reader: Reader, request: ParseRequest) -> Generator[None, None, ToolCall]:
    name, _ = yield from reader.until(">")
    name = name.strip().strip("\"'")
    if not name or "\n" in name or "<" in name:
        raise Malformed("name")
    schema = request.tools.get(name, {})
    arguments: dict[str, str] = {}
    mark = yield from reader.expect(PARAMETER, FUNCTION_END)
    while mark == PARAMETER:
        key, _ = yield from reader.until(">")
        key = key.strip()
        others = [other for other in properties_of(schema) if other != key and other not in arguments]
        unended = [f"\n{PARAMETER}{other}>" for other in others[:MAX_UNENDED]]
        value, mark = yield from reader.until(*VALUE_ENDS, *unended)
        if mark in unended:
            reader.at -= len(mark) - len(PARAMETER) - 1
            mark = PARAMETER
        value = value.removeprefix("\n")
        if mark.startswith(PARAMETER_END):
            value = value.removesuffix("\n")
        arguments[key] = to_json(value, parameter(schema, key) or frozenset({"string"}))
        if mark.endswith(END):
            reader.at -= len(END)
        mark = PARAMETER if mark.endswith(PARAMETER) else FUNCTION_END
    pairs = (f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in arguments.items())
    return make_call(name, "{" + ", ".join(pairs) + "}")


QWEN_XML = OutputFormat("qwen3_coder", parse, (BEGIN, END, *THINK), THINK, ((BEGIN, FUNCTION, PARAMETER),))
