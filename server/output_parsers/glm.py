"""``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>``: GLM 4.5 and later.

GLM 4.5 puts line breaks between the parts. Strings are bare text and other values JSON, so the tool's schema decides.
"""

from __future__ import annotations

import json
from collections.abc import Generator

from .base import OutputFormat, ParseRequest
from .events import ToolCall
from .reader import Incomplete, Malformed, Parser, Reader, make_call
from .schema_types import parameter, to_json
from .sections import only_text, reasoning, text_and_calls

BEGIN, END = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
VALUE_ENDS = tuple(f"{VALUE_END}{space}{after}" for space in ("", "\n") for after in (KEY, END))
THINK = ("<think>", "</think>")


def parse(reader: Reader, request: ParseRequest) -> Parser:
    """Parse an answer in GLM 4.5's format: add its reasoning, text and calls to ``reader.events``.

    Yields whenever it needs more text. Calls are recognised only if the request has tools.
    """
    markers = (BEGIN,) if request.tools else ()
    yield from reasoning(reader, request, THINK, calls=markers)
    if not request.tools:
        yield from only_text(reader)
        return

    def read(marker: str) -> Generator[None, None, list[ToolCall]]:
        name, mark = yield from reader.until(KEY, END)
        name = name.strip()
        if not name or "<" in name or len(name.split()) > 1:
            raise Malformed("name")
        schema = request.tools.get(name, {})
        arguments: dict[str, str] = {}
        while mark == KEY:
            key, _ = yield from reader.until(KEY_END)
            yield from reader.expect(VALUE)
            start = reader.at
            try:
                value, mark = yield from reader.until(*VALUE_ENDS)
            except Incomplete:
                # Models forget to end the last value.
                reader.at = start
                value, mark = yield from reader.until(END)
            arguments[key.strip()] = to_json(value, parameter(schema, key.strip()))
            mark = KEY if mark.endswith(KEY) else END
        pairs = (f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in arguments.items())
        return [make_call(name, "{" + ", ".join(pairs) + "}")]

    yield from text_and_calls(reader, markers, read)


GLM = OutputFormat("glm", parse, (BEGIN, END, *THINK, KEY, KEY_END, VALUE, VALUE_END), THINK, ((KEY, VALUE),))
