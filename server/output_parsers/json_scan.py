"""Reads JSON that a model is still writing, and checks it as far as it has come.

Text is JSON as ``make_call`` requires it, with one exception: strings may contain line breaks and other control
characters as they are, which models write. They are passed on as escapes.

Steps, each of which reads one token:

    value ──"{" or "["──▶ first ──▶ key, value or after
    key ──▶ string ──▶ colon ──▶ value
    value ──▶ string or scalar ──▶ after ──","──▶ key or value
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
_SCALAR = re.compile(r"[-+.\w]*")
_HEX, _D = "[0-9a-fA-F]", "[dD]"
_HIGH, _LOW = f"u{_D}[89abAB]{_HEX}{{2}}", f"u{_D}[c-fC-F]{_HEX}{{2}}"
"""Halves of a surrogate pair."""
_ESCAPE = rf'\\(?:["\\/bfnrt]|u(?!{_D}[89a-fA-F]){_HEX}{{4}}|{_HIGH}\\{_LOW})'
_ESCAPE_BEGUN = re.compile(rf"\\(?:u{_HEX}{{0,3}}|{_HIGH}(?:\\(?:u(?:{_D}(?:[c-fC-F]{_HEX}?)?)?)?)?)?")
"""The beginning of an escape, or of the escapes of a surrogate pair."""
_CHARACTERS = rf'[^"\\\x00-\x1f]*+(?:{_ESCAPE}[^"\\\x00-\x1f]*+)*+'
"""Characters of a string that are passed on as they are."""
_IN_STRING = re.compile(_CHARACTERS)
_IN_STRING_WITH_CONTROLS = re.compile(rf'[^"\\]*+(?:{_ESCAPE}[^"\\]*+)*+')
_CONTROLS = {chr(code): json.dumps(chr(code))[1:-1] for code in range(0x20)}
_AS_ESCAPES = str.maketrans(_CONTROLS)
_SMALL = rf'(?:"{_CHARACTERS}"|-?(?:0|[1-9][0-9]{{0,17}}+)(?:\.[0-9]{{1,17}}+)?|true|false|null)[{SPACE}]*+,'
"""A value without further ones in it, and a comma. Numbers are finite at this length."""
_ITEMS = re.compile(rf"(?:[{SPACE}]*+{_SMALL})*+")
_MEMBERS = re.compile(rf'(?:[{SPACE}]*+"{_CHARACTERS}"[{SPACE}]*+:[{SPACE}]*+{_SMALL})*+')


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
        """Place of the first character that has not been passed on."""
        self._pieces: list[str] = []
        """Text before that which ``add`` has not got."""
        self._closers: list[str] = []
        """Brackets that end the open objects and lists."""
        self._is_key = False
        """Whether the string that is being read is a key."""
        self._step: Callable[[JsonScan], bool] | None = JsonScan._value
        """Reads the next token, and returns False if more text is needed for it. None: the value has ended."""

    def value(self) -> Parser:
        """Read the value, and move past it. Yields whenever it needs more text.

        Raises ``Malformed``. ``add`` then has the text before the reader's position.
        """
        reader = self._reader
        try:
            while self._step is not None:
                if self._step(self):
                    continue
                if reader.has_ended:
                    raise Incomplete("JSON")
                self._flush(reader.at)
                yield
        except Malformed:
            self._flush(reader.at)
            raise
        self._flush(reader.at - self._keeps_end)

    # --- steps ---

    def _value(self) -> bool:
        reader = self._reader
        if self._closers and self._closers[-1] == "]":
            self._skip(_ITEMS)
        mark = self._next()
        if not mark:
            return False
        if mark not in '{["':
            return self._scalar()
        if mark == '"':
            self._is_key, self._step = False, JsonScan._string
        else:
            if len(self._closers) == MAX_LEVELS:
                raise Malformed("JSON")
            self._closers.append("}" if mark == "{" else "]")
            self._step = JsonScan._first
        reader.at += 1
        return True

    def _first(self) -> bool:
        """Find out whether an object or list is empty, which has just begun."""
        mark, closer = self._next(), self._closers[-1]
        if mark == closer:
            self._step = JsonScan._after
        elif mark:
            self._step = JsonScan._key if closer == "}" else JsonScan._value
        return bool(mark)

    def _key(self) -> bool:
        self._skip(_MEMBERS)
        mark = self._next()
        if mark == '"':
            self._is_key, self._step = True, JsonScan._string
            self._reader.at += 1
        elif mark:
            raise Malformed("JSON")
        return bool(mark)

    def _string(self) -> bool:
        """Read the rest of a string."""
        reader = self._reader
        self._skip(_IN_STRING)
        if reader.text[reader.at : reader.at + 1] in _CONTROLS:
            self._escape_controls()
        text, at = reader.text, reader.at
        if at == len(text):
            return False
        if text[at] == "\\":
            if not _ESCAPE_BEGUN.fullmatch(text, at):
                raise Malformed("JSON")
            return False
        reader.at += 1
        self._step = JsonScan._colon if self._is_key else self._next_step()
        return True

    def _scalar(self) -> bool:
        reader = self._reader
        found = _SCALAR.match(reader.text, reader.at)
        assert found is not None
        if len(found.group()) > MAX_SCALAR_CHARACTERS:
            raise Malformed("JSON")
        if found.end() == len(reader.text):
            return False
        try:
            orjson.loads(found.group())
        except ValueError as e:
            raise Malformed("JSON") from e
        reader.at = found.end()
        self._step = self._next_step()
        return True

    def _colon(self) -> bool:
        mark = self._next()
        if mark == ":":
            self._reader.at += 1
            self._step = JsonScan._value
        elif mark:
            raise Malformed("JSON")
        return bool(mark)

    def _after(self) -> bool:
        """Read what follows a value: the end of the object or list that it is in, or a comma."""
        mark = self._next()
        if mark == self._closers[-1]:
            self._closers.pop()
            self._step = self._next_step()
        elif mark == ",":
            self._step = JsonScan._key if self._closers[-1] == "}" else JsonScan._value
        elif mark:
            raise Malformed("JSON")
        self._reader.at += bool(mark)
        return bool(mark)

    # --- parts of steps ---

    def _next(self) -> str:
        """Move past white space. Return the character that follows, or "" if none has arrived."""
        self._skip(_SPACES)
        return self._reader.text[self._reader.at : self._reader.at + 1]

    def _skip(self, pattern: re.Pattern[str]) -> None:
        found = pattern.match(self._reader.text, self._reader.at)
        assert found is not None
        self._reader.at = found.end()

    def _next_step(self) -> Callable[[JsonScan], bool] | None:
        """Return the step after a value."""
        return JsonScan._after if self._closers else None

    def _escape_controls(self) -> None:
        """Read on in a string, and replace control characters."""
        reader = self._reader
        self._keep(reader.at)
        self._skip(_IN_STRING_WITH_CONTROLS)
        self._pieces.append(reader.text[self._from : reader.at].translate(_AS_ESCAPES))
        self._from = reader.at

    def _keep(self, end: int) -> None:
        """Note that the text before ``end`` is passed on as it is."""
        if end > self._from:
            self._pieces.append(self._reader.text[self._from : end])
        self._from = end

    def _flush(self, end: int) -> None:
        reader = self._reader
        self._keep(end)
        if self._pieces:
            self._add("".join(self._pieces))
            self._pieces.clear()
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
