"""``{"name": …, "parameters": {…}}`` and nothing else, perhaps behind ``<|python_tag|>``.

Llama 3 writes so, and Llama 4 where its template asks for JSON.

An answer may be JSON itself: it is a call only where it names a tool of the request.
"""

from __future__ import annotations

from collections.abc import Generator

from .base import CallShape, OutputFormat, ParseRequest
from .events import ToolCall
from .json_calls import read_call
from .reader import Malformed, Parser, Reader
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
        separator = ";"
        while separator:
            yield from read_call(reader, name_keys=("name", "function"), offered=request.tools)
            after = reader.at
            yield from reader.skip_space()
            separator = (yield from reader.takes(";")) or (yield from reader.sees("{"))
            if not separator and not (yield from reader.is_last()):
                if not marker:
                    raise Malformed("end")
                reader.at = after
            reader.complete_call()
        return []

    yield from reader.skip_space()
    if (yield from reader.sees("{")):
        try:
            yield from read("")
        except Malformed:
            is_told = reader.break_call()
            reader.at = len(reader.text) if is_told and reader.is_cut else 0
            reader.drop_read()
    else:
        reader.at = 0
    yield from text_and_calls(reader, (TAG,), read)


SHAPE = CallShape('{"name": "NAME", "parameters": ', "}")
SIGNS = tuple((header, '"parameters":') for header in HEADERS)
LLAMA_JSON = OutputFormat("llama3_json", parse, (TAG,), signs=SIGNS, shape=SHAPE)
