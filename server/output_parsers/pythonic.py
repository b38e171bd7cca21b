"""``[f(a=1), g(b='x')]``: Llama 4, Llama 3.2 and others that write calls as a list of Python calls."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Generator
from typing import Any

from .base import OutputFormat, ParseRequest
from .events import ToolCall
from .reader import Malformed, Parser, Reader, make_call
from .sections import only_text

BEGIN, END = "<|python_start|>", "<|python_end|>"
MAX_CHARACTERS = 1 << 20
_PAIRS = {"[": "]", "(": ")", "{": "}"}


def parse(reader: Reader, request: ParseRequest) -> Parser:
    """Parse an answer in Llama 4's list of Python calls: add its text and calls to ``reader.events``.

    Yields whenever it needs more text. Calls are recognised only if the request has tools.
    """
    if request.tools:
        yield from reader.skip_space()
        yield from reader.takes(BEGIN)
        yield from reader.skip_space()
        if (yield from reader.sees("[")):
            start = reader.at
            try:
                text = yield from _brackets(reader)
                calls = calls_of(text)
                yield from reader.skip_space()
                yield from reader.takes(END)
                if not (yield from reader.is_last()) or any(call.name not in request.tools for call in calls):
                    raise Malformed("end")
            except Malformed:
                reader.at = start
            else:
                for call in calls:
                    reader.emit_call(call)
                reader.drop_read()
        if reader.text[: reader.at].strip() != BEGIN:
            reader.at = 0
    yield from only_text(reader)


def _brackets(reader: Reader) -> Generator[None, None, str]:
    """Return the text from the bracket at the reader's position to its closing bracket, and move past it.

    Raises ``Malformed`` if the answer ends before.
    """
    start, at, quote = reader.at, reader.at, ""
    expected: list[str] = []
    while True:
        while at >= len(reader.text):
            if reader.has_ended:
                raise Malformed("]")
            yield
        character = reader.text[at]
        at += 1
        if quote:
            if character == "\\":
                while at >= len(reader.text) and not reader.has_ended:
                    yield
                at += 1
            elif character == quote:
                quote = ""
        elif character in "'\"":
            quote = character
        elif character in _PAIRS:
            expected.append(_PAIRS[character])
        elif expected and character == expected[-1]:
            expected.pop()
            if not expected:
                reader.at = at
                return reader.text[start:at]


def calls_of(text: str) -> list[ToolCall]:
    """Return the calls in a Python list such as ``[f(a=1), g()]``, with keyword arguments only.

    Raises ``Malformed`` for any other text, and for arguments that are not literals that JSON has as well.
    """
    if len(text) > MAX_CHARACTERS:
        raise Malformed("too long")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        raise Malformed("calls") from e
    if not isinstance(tree, ast.List) or not tree.elts:
        raise Malformed("calls")
    return [_call(node) for node in tree.elts]


def _call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args:
        raise Malformed("call")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise Malformed("call")
        arguments[keyword.arg] = _literal(keyword.value)
    return make_call(_name(node.func), json.dumps(arguments, ensure_ascii=False))


def _name(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise Malformed("name")
    return ".".join([node.id, *reversed(parts)])


def _literal(node: ast.expr) -> Any:
    """Return the value of a Python literal that JSON has as well; also of JSON's own true, false and null.

    Raises ``Malformed`` for anything else.
    """
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(one) for one in node.elts]
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        return {str(key.value): _literal(value) for key, value in zip(node.keys, node.values, strict=True)}  # type: ignore[union-attr]
    try:
        value = ast.literal_eval(node)
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as e:
        raise Malformed("argument") from e
    return value


PYTHONIC = OutputFormat("pythonic", parse, (BEGIN, END), signs=(("[func_name1(",), ("<|header_start|>",)))
