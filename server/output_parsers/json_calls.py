"""Reads tool calls with arguments in JSON. Readers that stream arguments tell them while the model writes them.

``read_call`` leaves a call open: what ends it in the format may still follow. Its parser then completes it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from .base import Tools
from .json_scan import JsonScan, json_text
from .reader import Malformed, Parser, Reader, arguments_of, make_call, parse_json

ARGUMENT_KEYS = ("arguments", "parameters")


def read_arguments(reader: Reader, name: str) -> Parser:
    """Read the arguments at the reader's position, and open a call of the tool ``name`` with them.

    They are an object, null for an empty one, or a string with an object. Only an object can be streamed. Raises
    ``Malformed``. Yields whenever it needs more text.
    """
    yield from reader.skip_space()
    if not (yield from reader.sees("{")):
        text = yield from json_text(reader)
        reader.hold_call(make_call(name, arguments_of(text, parse_json(text))))
        return
    is_told = reader.open_call(name).told_as is not None
    yield from JsonScan(reader, reader.add_arguments, keeps_end=True, drops_read=is_told).value()


def read_call(reader: Reader, *, name_keys: Sequence[str] = ("name",), offered: Tools | None = None) -> Parser:
    """Read a JSON object with a name and ``arguments`` or ``parameters`` at the position, and open the call.

    Without arguments, they are empty. If they come before the name, they can't be streamed. ``name_keys``: keys that
    may hold the name; the first one is preferred. ``offered``: tools that can be called; None: any. Raises
    ``Malformed``. Yields whenever it needs more text.
    """
    name, arguments = "", ""
    yield from reader.expect("{")
    mark = yield from _follows(reader, "}")
    while not mark:
        key = yield from _text(reader)
        yield from reader.expect(":")
        if key in ARGUMENT_KEYS:
            if arguments or reader.call is not None:
                raise Malformed("arguments")
            if name:
                _check_offered(name, offered)
                yield from read_arguments(reader, name)
            else:
                arguments = yield from json_text(reader)
        elif key in name_keys and reader.call is not None:
            raise Malformed("name")
        elif key in name_keys and (not name or key == name_keys[0]):
            name = yield from _text(reader)
        else:
            yield from json_text(reader)
        mark = "" if (yield from reader.expect(",", "}")) == "," else "}"
    if not name:
        raise Malformed("name")
    if reader.call is None:
        _check_offered(name, offered)
        text = arguments or "null"
        reader.hold_call(make_call(name, arguments_of(text, parse_json(text))))


def read_calls(reader: Reader) -> Generator[None, None, int]:
    """Read and complete the call that a JSON object describes, or the calls of a list of such objects.

    Return the number of calls. Raises ``Malformed``: calls before that are complete. Yields whenever it needs more
    text.
    """
    yield from reader.skip_space()
    if not (yield from reader.takes("[")):
        yield from read_call(reader)
        reader.complete_call()
        return 1
    calls = 0
    mark = yield from _follows(reader, "]")
    while mark != "]":
        yield from read_call(reader)
        mark = yield from reader.expect(",", "]")
        reader.complete_call()
        calls += 1
    return calls


def _follows(reader: Reader, mark: str) -> Generator[None, None, str]:
    """Move past white space, and past ``mark`` if it follows. Return it, or "" if something else follows."""
    yield from reader.skip_space()
    return (yield from reader.takes(mark))


def _text(reader: Reader) -> Generator[None, None, str]:
    """Return the JSON string at the position, decoded. Raises ``Malformed`` for anything else."""
    value = parse_json((yield from json_text(reader)))
    if not isinstance(value, str):
        raise Malformed("string")
    return value


def _check_offered(name: str, offered: Tools | None) -> None:
    if offered is not None and name not in offered:
        raise Malformed("name")
