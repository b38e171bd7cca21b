"""``{"name": …, "parameters": {…}}`` and nothing else, perhaps behind ``<|python_tag|>``.

Llama 3 writes so, and Llama 4 where its template asks for JSON.

An answer may be JSON itself: it is a call only where it names a tool of the request.
"""

from __future__ import annotations

from collections.abc import Generator

from .base import CallShape, OutputFormat, ParseRequest
from .events import ToolCall
from .reader import Malformed, Parser, Reader, call_of
from .sections import only_text, text_and_calls

TAG = "<|python_tag|>"
HEADERS = ("<|start_header_id|>", "<|header_start|>")
"""Beginnings of a turn in Llama 3 and Llama 4."""


def parse(reader: Reader, request: ParseRequest) -> Parser:
    """Parse an answer in Llama's JSON format: add its text and calls to ``reader.events``.

    Yields whenever it needs more text. Calls are recognised only if the request has tools.
    """
    if not request.tools:
        yield from only_text(reader)
        return

    def read(marker: str) -> Generator[None, None, list[ToolCall]]:
        calls = []
        separator = ";"
        while separator:
            text, value = yield from reader.json_value()
            call = call_of(text, value, name_keys=("name", "function"))
            if call.name not in request.tools:
                raise Malformed("name")
            calls.append(call)
            after = reader.at
            yield from reader.skip_space()
            separator = yield from reader.takes(";")
            if not separator:
                separator = "{" if (yield from reader.sees("{")) else ""
        if not marker and reader.at < len(reader.text):
            raise Malformed("end")
        reader.at = reader.at if reader.at == len(reader.text) else after
        return calls

    yield from reader.skip_space()
    if (yield from reader.sees("{")):
        try:
            calls = yield from read("")
            if not (yield from reader.is_last()):
                raise Malformed("end")
        except Malformed:
            reader.at = 0
        else:
            for call in calls:
                reader.emit_call(call)
            reader.drop_read()
    else:
        reader.at = 0
    yield from text_and_calls(reader, (TAG,), read)


SHAPE = CallShape('{"name": "NAME", "parameters": ', "}")
SIGNS = tuple((header, '"parameters":') for header in HEADERS)
LLAMA_JSON = OutputFormat("llama3_json", parse, (TAG,), signs=SIGNS, shape=SHAPE)
