"""Reads JSON that a model is still writing, and checks it as far as it has come.

Text is JSON as ``make_call`` requires it, with one exception: strings may contain line breaks and other control
characters as they are, which models write. They are passed on as escapes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator

import orjson

from .reader import SPACE, Incomplete, Malformed, Parser, Reader

MAX_LEVELS = 237
"""Maximum levels of objects and lists in a call's arguments; ``make_call`` refuses more."""
MAX_SCALAR_CHARACTERS = 4096
"""Maximum characters of a number. Python's own clients refuse longer ones."""
_SPACES = re.compile(f"[{SPACE}]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR = re.compile(r"[-+.\w]*")
_HEX, _D = "[0-9a-fA-F]", "[dD]"
_HIGH, _LOW = f"u{_D}[89abAB]{_HEX}{{2}}", f"u{_D}[c-fC-F]{_HEX}{{2}}"
"""Halves of a surrogate pair."""
_ESCAPE = re.compile(rf'\\(?:["\\/bfnrt]|u(?!{_D}[89a-fA-F]){_HEX}{{4}}|{_HIGH}\\{_LOW})')
_ESCAPE_BEGUN = re.compile(rf"\\(?:u{_HEX}{{0,3}}|{_HIGH}(?:\\(?:u(?:{_D}(?:[c-fC-F]{_HEX}?)?)?)?)?)?")
"""The beginning of an escape, or of the escapes of a surrogate pair."""


class JsonScan:
    """Reads one JSON value from the reader's position on.

    ``add`` gets its text in pieces, as soon as they are certain. What it has got by then depends on the text that has
    arrived, not on its pieces. ``keeps_end``: leave the last character of an object or list to the caller.
    ``drops_read``: drop from the reader's text what ``add`` has got.
    """

    def __init__(
        self, reader: Reader, add: Callable[[str], None], *, keeps_end: bool = False, drops_read: bool = False
    ) -> None:
        self._reader = reader
        self._add = add
        self._keeps_end = keeps_end
        self._drops_read = drops_read
        self._from = reader.at
        """Place of the first character that has not been added."""

    def value(self) -> Parser:
        """Read the value, and move past it. Yields whenever it needs more text.

        Raises ``Malformed``. ``add`` then has the text before the reader's position.
        """
        try:
            yield from self._value()
        except Malformed:
            self._flush(self._reader.at)
            raise
        self._flush(self._reader.at - self._keeps_end)

    def _value(self) -> Parser:
        reader = self._reader
        closers: list[str] = []
        while True:
            mark = yield from self._next()
            if mark in "{[":
                closers.append("}" if mark == "{" else "]")
                if len(closers) > MAX_LEVELS:
                    raise Malformed("JSON")
                reader.at += 1
                if (yield from self._next()) != closers[-1]:
                    if mark == "{":
                        yield from self._key()
                    continue
            elif mark == '"':
                yield from self._string()
            else:
                yield from self._scalar()
            if (yield from self._is_last(closers)):
                return

    def _is_last(self, closers: list[str]) -> Generator[None, None, bool]:
        """Move past what follows a value; return whether that ends the outermost one. Else another one follows."""
        while closers:
            mark = yield from self._next()
            if mark == closers[-1]:
                closers.pop()
            elif mark != ",":
                raise Malformed("JSON")
            self._reader.at += 1
            if mark == ",":
                if closers[-1] == "}":
                    yield from self._key()
                return False
        return True

    def _key(self) -> Parser:
        if (yield from self._next()) != '"':
            raise Malformed("JSON")
        yield from self._string()
        if (yield from self._next()) != ":":
            raise Malformed("JSON")
        self._reader.at += 1

    def _next(self) -> Generator[None, None, str]:
        """Move past white space, and return the character that follows."""
        reader = self._reader
        while True:
            found = _SPACES.match(reader.text, reader.at)
            assert found is not None
            reader.at = found.end()
            if reader.at < len(reader.text):
                return reader.text[reader.at]
            yield from self._more()

    def _string(self) -> Parser:
        reader = self._reader
        reader.at += 1
        while True:
            found = _PLAIN.match(reader.text, reader.at)
            assert found is not None
            reader.at = found.end()
            if reader.at == len(reader.text):
                yield from self._more()
                continue
            mark = reader.text[reader.at]
            if mark == "\\":
                yield from self._escape()
                continue
            if mark != '"':
                self._flush(reader.at)
                self._add(json.dumps(mark)[1:-1])
                self._from = reader.at + 1
            reader.at += 1
            if mark == '"':
                return

    def _escape(self) -> Parser:
        reader = self._reader
        while (found := _ESCAPE.match(reader.text, reader.at)) is None:
            if not _ESCAPE_BEGUN.fullmatch(reader.text, reader.at):
                raise Malformed("JSON")
            yield from self._more()
        reader.at = found.end()

    def _scalar(self) -> Parser:
        reader = self._reader
        while True:
            found = _SCALAR.match(reader.text, reader.at)
            assert found is not None
            if found.end() < len(reader.text) or len(found.group()) > MAX_SCALAR_CHARACTERS:
                break
            yield from self._more()
        if len(found.group()) > MAX_SCALAR_CHARACTERS:
            raise Malformed("JSON")
        try:
            orjson.loads(found.group())
        except ValueError as e:
            raise Malformed("JSON") from e
        reader.at = found.end()

    def _more(self) -> Parser:
        """Wait for more text. Raises ``Incomplete`` if none follows."""
        if self._reader.has_ended:
            raise Incomplete("JSON")
        self._flush(self._reader.at)
        yield

    def _flush(self, end: int) -> None:
        reader = self._reader
        if end > self._from:
            self._add(reader.text[self._from : end])
        self._from = end
        if self._drops_read:
            reader.text, reader.at, self._from = reader.text[end:], reader.at - end, 0


def json_text(reader: Reader) -> Generator[None, None, str]:
    """Return the JSON value at the position as text, and move past it.

    Raises ``Malformed``. Yields whenever it needs more text.
    """
    yield from reader.skip_space()
    pieces: list[str] = []
    yield from JsonScan(reader, pieces.append).value()
    return "".join(pieces)
