"""Reads the text of an answer as it arrives, for a parser that is written as if all of it were there.

A parser is a generator: it yields where it needs more text, and goes on when there is more or the answer has ended.
What it decides depends on the text alone, never on how the text was divided into pieces. So a streamed answer has the
same events as a whole one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import orjson

from .events import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCall,
    ToolCallEnded,
    ToolCallStarted,
)

Find = Callable[[str, int], re.Match[str] | None]
Parser = Generator[None, None, None]
"""Yields where it needs more text."""
SPACE = " \t\r\n"
_decoder = json.JSONDecoder(strict=False)
LEVELS_AROUND = 16
"""Levels of objects and lists that answers have around a call's arguments, generously."""


class Malformed(Exception):
    """The text at the reader's place is not what the format requires."""


class Incomplete(Malformed):
    """The text ends within what the format requires."""


@dataclass
class OpenCall:
    """A call of a tool that is being read."""

    name: str
    end: str = ""
    """Text that ends the arguments once the call is complete."""
    pieces: list[str] = field(default_factory=list)
    """Arguments that have not been told."""
    told_as: int | None = None
    """Number of a call that is told piece by piece; None: it is told when it is complete."""


class Reader:
    """The text of one answer, with a place in it.

    ``streams_arguments``: tell the arguments of calls as they arrive, where the format allows it. ``most_calls``: leave
    out complete calls beyond this number; None: tell all.
    """

    def __init__(self, *, streams_arguments: bool = False, most_calls: int | None = None) -> None:
        self.events: list[OutputEvent] = []
        """Events that have not been taken."""
        self.calls = 0
        """Complete calls so far, those that are left out among them."""
        self.call: OpenCall | None = None
        """The call that is being read."""
        self._streams_arguments = streams_arguments
        self._most_calls = most_calls
        self._numbers = 0
        """Calls that have a number. Among them is one that broke off after its beginning was told."""
        self.has_ended = False
        """Whether no more text follows."""
        self.is_cut = False
        """Whether the text ended because of a limit."""
        self.text = ""
        """Text that is still needed."""
        self.at = 0
        """Place in ``text``."""
        self._held = ""
        """White space that belongs to the text only if more text follows."""
        self._drops_held = False
        """Whether a call or reasoning was found since the held white space began."""
        self._has_text = False
        self.space = ""
        """White space before the marker that ``show_until`` returned last."""

    # --- events ---

    def emit_text(self, text: str) -> None:
        """Add text for the user to the events. White space at its end is held back until more text follows.

        White space is dropped before the first text if reasoning or a call comes before it.
        """
        shown = text.rstrip(SPACE)
        if not shown:
            self._held += text
            return
        if not self._has_text and self._drops_held:
            self._held, shown, text = "", shown.lstrip(SPACE), text.lstrip(SPACE)
        self._add(TextDelta, self._held + shown)
        self._held = text[len(shown) :]
        self._drops_held, self._has_text = False, True

    def emit_reasoning(self, text: str) -> None:
        """Add reasoning to the events; join it to the last event if that is reasoning, too. "" adds nothing."""
        if text:
            self._add(ReasoningDelta, text)

    def emit_call(self, call: ToolCall) -> None:
        """Add a complete tool call to the events, and number it: the answer's first call is 0."""
        self._drops_held = True
        if self._may_call():
            self.events.append(call._replace(number=self._number()))
        self.calls += 1

    def _may_call(self) -> bool:
        return self._most_calls is None or self.calls < self._most_calls

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers - 1

    def open_call(self, name: str) -> OpenCall:
        """Begin a call of the tool ``name``. ``add_arguments`` adds its arguments, all but the brace that ends them.

        Raises ``Malformed`` if answers can't contain the name.
        """
        make_call(name, "{}")
        self.call = OpenCall(name, "}")
        if self._streams_arguments and self._may_call():
            self._drops_held = True
            self.call.told_as = self._number()
            self.events.append(ToolCallStarted(name, self.call.told_as))
        return self.call

    def hold_call(self, call: ToolCall) -> None:
        """Open a call with all of its arguments. It is told when it is complete."""
        self.call = OpenCall(call.name, pieces=[call.arguments])

    def add_arguments(self, text: str) -> None:
        """Add a piece of the arguments of the open call."""
        assert self.call is not None
        number = self.call.told_as
        if number is None:
            self.call.pieces.append(text)
        elif isinstance(last := self.events[-1] if self.events else None, ToolArgumentsDelta):
            self.events[-1] = ToolArgumentsDelta(last.text + text, number)
        else:
            self.events.append(ToolArgumentsDelta(text, number))

    def complete_call(self) -> None:
        """Complete the open call, and forget the text before the reader's position."""
        assert self.call is not None
        self.add_arguments(self.call.end)
        call, self.call = self.call, None
        if call.told_as is None:
            self.emit_call(make_call(call.name, "".join(call.pieces)))
        else:
            self.events.append(ToolCallEnded(call.told_as, True))
            self.calls += 1
        self.drop_read()

    def break_call(self) -> bool:
        """Give up the open call, if there is one. Return whether its beginning has been told.

        Then the text that has not been told begins at the beginning of ``text``.
        """
        call, self.call = self.call, None
        if call is None or call.told_as is None:
            return False
        self.events.append(ToolCallEnded(call.told_as, False))
        return True

    def leave_reasoning(self) -> None:
        """Note that reasoning has ended: white space before the answer is not part of it."""
        self._drops_held = True

    def finish(self) -> None:
        """Add the white space that ends the text, once no more follows. It is dropped beside a call or reasoning."""
        if self._held and not self._drops_held:
            self._add(TextDelta, self._held)
        self._held = ""

    def _add(self, kind: type[TextDelta] | type[ReasoningDelta], text: str) -> None:
        last = self.events[-1] if self.events else None
        if isinstance(last, kind):
            self.events[-1] = kind(last.text + text)
        else:
            self.events.append(kind(text))

    # --- reading ---

    def append(self, text: str) -> None:
        """Add text that has arrived.

        Python appends in place to a string that only one local variable refers to. Otherwise it would copy all of an
        unfinished call for each token.
        """
        kept, self.text = self.text, ""
        kept += text
        self.text = kept

    @property
    def rest(self) -> str:
        """All text from the reader's position on, as far as it has arrived."""
        return self.text[self.at :]

    def drop_read(self) -> None:
        """Forget the text before the reader's position: no parser returns to it."""
        self.text, self.at = self.text[self.at :], 0

    def skip_space(self) -> Parser:
        """Move to the next character that is not white space, or to the end. Yields whenever it needs more text."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in SPACE:
                self.at += 1
            if self.at < len(self.text) or self.has_ended:
                return
            yield

    def is_last(self) -> Generator[None, None, bool]:
        """Move past white space; return whether the answer ends there. Yields until that is known."""
        yield from self.skip_space()
        while not self.has_ended and self.at == len(self.text):
            yield
            yield from self.skip_space()
        return self.at == len(self.text)

    def sees(self, *markers: str) -> Generator[None, None, str]:
        """Return the first of ``markers`` that begins at the position, else "". The position stays.

        Yields while the text that has arrived may become one of them.
        """
        while True:
            for marker in markers:
                if self.text.startswith(marker, self.at):
                    return marker
            rest = len(self.text) - self.at
            is_open = any(rest < len(m) and m.startswith(self.rest) for m in markers)
            if self.has_ended or not is_open:
                return ""
            yield

    def takes(self, *markers: str) -> Generator[None, None, str]:
        """Return the first of ``markers`` that begins at the position, and move past it.

        Return "" and stay if none does. Yields while the text that has arrived may become one of them.
        """
        marker = yield from self.sees(*markers)
        self.at += len(marker)
        return marker

    def expect(self, *markers: str) -> Generator[None, None, str]:
        """Move past white space and the one of ``markers`` that follows, and return that marker.

        Raises ``Malformed`` if none follows. Yields whenever it needs more text.
        """
        yield from self.skip_space()
        marker = yield from self.takes(*markers)
        if not marker:
            is_open = any(one.startswith(self.rest) for one in markers)
            raise (Incomplete if self.has_ended and is_open else Malformed)(markers[0])
        return marker

    def until(self, *markers: str) -> Generator[None, None, tuple[str, str]]:
        """Return the text before the first of ``markers``, and that marker; move past both.

        Yields until a marker has arrived. Raises ``Incomplete``, a ``Malformed``, if the answer ends without one.
        """
        start, looked = self.at, self.at
        longest = max(map(len, markers))
        while True:
            found = [(i, m) for m in markers if (i := self.text.find(m, looked)) >= 0]
            if found:
                i, marker = min(found, key=lambda one: (one[0], -len(one[1])))
                # A longer marker may begin at the same place, and not be complete yet.
                if self.has_ended or not any(len(m) > len(marker) and m.startswith(self.text[i:]) for m in markers):
                    self.at = i + len(marker)
                    return self.text[start:i], marker
            if self.has_ended:
                raise Incomplete(markers[0])
            looked = max(start, len(self.text) - longest + 1)
            yield

    def show_until(self, *markers: str, reasoning: bool = False) -> Generator[None, None, str]:
        """Emit text up to the first of ``markers``, as it arrives. Return the marker, or "" at the answer's end.

        ``reasoning``: emit it as reasoning. The text before the marker is dropped, and the position is after the
        marker.
        """
        emit = self.emit_reasoning if reasoning else self.emit_text
        space = ""
        find, begins = _search(markers)
        while True:
            found = find(self.text, self.at)
            if found is not None:
                i, marker = found.start(), found.group()
                text = space * reasoning + self.text[self.at : i]
                self.space = text[len(text.rstrip(SPACE)) :]
                emit(text.rstrip(SPACE) if reasoning else text)
                self.text, self.at = self.text[i:], len(marker)
                return marker
            certain = len(self.text)
            # As a rule no marker begins in the last few characters.
            if not self.has_ended and begins(self.text, self.at) is not None:
                certain = self._certain(markers)
            piece = self.text[self.at : certain]
            if reasoning:
                shown = piece.rstrip(SPACE)
                if shown:
                    emit(space + shown)
                    space = ""
                space += piece[len(shown) :]
            elif piece:
                emit(piece)
            self.text, self.at = self.text[certain:], 0
            if self.has_ended:
                return ""
            yield

    def _certain(self, markers: Sequence[str]) -> int:
        """Return the index up to which the text can be emitted: no marker may have begun before it."""
        end = len(self.text)
        for marker in markers:
            for size in range(min(len(marker) - 1, len(self.text) - self.at), 0, -1):
                if self.text.endswith(marker[:size]):
                    end = min(end, len(self.text) - size)
                    break
        return end


@cache
def _search(markers: tuple[str, ...]) -> tuple[Find, Find]:
    """Return two search functions: one finds any of ``markers``, the other a character that begins one of them."""
    if not markers:
        return _find_nothing, _find_nothing
    longest_first = sorted(markers, key=len, reverse=True)
    firsts = "".join(sorted({re.escape(marker[0]) for marker in markers}))
    return re.compile("|".join(map(re.escape, longest_first))).search, re.compile(f"[{firsts}]").search


def _find_nothing(text: str, start: int) -> None:
    return None


def parse_json(text: str) -> Any:
    """Decode ``text``, which is one JSON value; strings may contain line breaks as they are. Raises ``Malformed``."""
    try:
        value, end = _decoder.raw_decode(text.strip(SPACE))
    except (ValueError, RecursionError) as e:
        raise Malformed("JSON") from e
    if end != len(text.strip(SPACE)):
        raise Malformed("JSON")
    return value


def strict_json(text: str) -> str:
    """Return a JSON value's text: as it is if it is strict JSON, else encoded anew. Raises ``Malformed``.

    Line breaks in strings are repaired so. NaN and infinities are refused.
    """
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        value = parse_json(text)
    else:
        return text
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError) as e:
        raise Malformed("JSON") from e


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def make_call(name: str, arguments: str) -> ToolCall:
    """Return the call of the tool ``name``. Raises ``Malformed`` if answers can't contain it.

    Their JSON has no half of a surrogate pair, no number that is infinite as a float, and about 250 levels.
    """
    try:
        value = orjson.loads(arguments)
        for _ in range(LEVELS_AROUND):
            value = [value]
        orjson.dumps([name, value])
    except (ValueError, TypeError) as e:
        raise Malformed("call") from e
    return ToolCall(name, arguments)


def arguments_of(text: str, value: Any) -> str:
    """Return a call's arguments as the text of a JSON object; "{}" for null. Raises ``Malformed`` for anything else.

    ``text``: the arguments as they are written. ``value``: decoded. A string may hold the object as JSON.
    """
    if isinstance(value, str):
        text, value = value, parse_json(value)
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise Malformed("arguments")
    return strict_json(text)
