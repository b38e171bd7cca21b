"""DeepSeek's markup since V3.2: ``<｜DSML｜invoke name="NAME">`` with a parameter element for each argument.

The element around the calls is ``function_calls``, ``tool_calls`` or ``calls``, by version. A parameter says whether it
is a string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator

from .base import OutputFormat, ParseRequest
from .events import ToolCall
from .reader import Malformed, Parser, Reader, make_call, parse_json, strict_json
from .sections import only_text, reasoning, text_and_calls

OPEN, CLOSE = "<｜DSML｜", "</｜DSML｜"
AROUND = ("function_calls>", "tool_calls>", " calls>")
THINK = ("<think>", "</think>")
_NAME = re.compile(r'\s*name="([^"]+)"\s*')
_PARAMETER = re.compile(r'\s*name="([^"]*)"(?:\s+string="(true|false)")?\s*')


def parse(reader: Reader, request: ParseRequest) -> Parser:
    """Parse an answer in the DSML format of DeepSeek V3.2: add its reasoning, text and calls to ``reader.events``.

    Yields whenever it needs more text. Calls are recognised only if the request has tools.
    """
    markers = tuple(bracket + name for name in AROUND for bracket in (OPEN, CLOSE))
    invokes = (f"{OPEN}invoke", f"{OPEN} invoke")
    markers = (*markers, *invokes) if request.tools else ()
    yield from reasoning(reader, request, THINK, calls=markers)
    if not request.tools:
        yield from only_text(reader)
        return

    def read(marker: str) -> Generator[None, None, list[ToolCall]]:
        return [(yield from _invoke(reader))] if marker in invokes else []

    yield from text_and_calls(reader, markers, read)


def _invoke(reader: Reader) -> Generator[None, None, ToolCall]:
    head, _ = yield from reader.until(">")
    found = _NAME.fullmatch(head.removesuffix("/"))
    if found is None:
        raise Malformed("name")
    arguments: dict[str, str] = {}
    while not head.endswith("/"):
        mark = yield from reader.expect(*(f"{b}{s}{n}" for s in ("", " ") for b, n in _INSIDE))
        if mark.startswith(CLOSE):
            yield from reader.expect(">")
            break
        inner, _ = yield from reader.until(">")
        own = _PARAMETER.fullmatch(inner)
        if own is None:
            raise Malformed("parameter")
        value, _ = yield from reader.until(f"{CLOSE}parameter>", f"{CLOSE} parameter>")
        arguments[own[1]] = json.dumps(value, ensure_ascii=False) if own[2] != "false" else _as_json(value)
    pairs = (f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in arguments.items())
    return make_call(found[1], "{" + ", ".join(pairs) + "}")


def _as_json(value: str) -> str:
    try:
        parse_json(value)
        return strict_json(value.strip())
    except Malformed:
        return json.dumps(value, ensure_ascii=False)


_INSIDE = ((OPEN, "parameter"), (CLOSE, "invoke"))
DSML = OutputFormat("deepseek_v32", parse, ("｜DSML｜", *THINK), THINK, (("｜DSML｜",),))
