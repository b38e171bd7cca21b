"""Parts that the parsers of several formats share."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from .base import ParseRequest
from .events import ToolCall
from .reader import SPACE, Incomplete, Malformed, Parser, Reader

ReadCalls = Callable[[str], Generator[None, None, list[ToolCall]]]
"""Reads the calls behind the marker that it is given, and returns those that are not emitted. Raises ``Malformed``."""


def reasoning(reader: Reader, request: ParseRequest, *pairs: tuple[str, str], calls: Sequence[str] = ()) -> Parser:
    """Emit an answer's reasoning, if it begins with the first text of one of ``pairs``, up to that pair's second text.

    It also begins with reasoning if the prompt ended within reasoning. Do nothing if the request does not separate
    reasoning. ``calls``: markers of tool calls. A call ends the reasoning if no other end follows. Otherwise the call
    was only a thought.
    """
    if not request.separates_reasoning:
        return
    is_open, start = request.begins_in_reasoning, reader.at
    yield from reader.skip_space()
    # With is_open: some models repeat what the prompt ends with.
    begin = yield from reader.takes(*(pair[0] for pair in pairs))
    if not begin and not is_open:
        reader.at = start
        return
    end = dict(pairs).get(begin, pairs[0][1])
    yield from reader.skip_space()
    reader.drop_read()
    marker = yield from reader.show_until(end, *calls, reasoning=True)
    if marker and marker != end:
        space = reader.space
        try:
            thought, _ = yield from reader.until(end)
        except Malformed:
            reader.at = 0
        else:
            reader.emit_reasoning(space + marker + thought.rstrip(SPACE))
    reader.drop_read()
    reader.leave_reasoning()


def text_and_calls(reader: Reader, markers: Sequence[str], read: ReadCalls) -> Parser:
    """Emit the rest of an answer: text, and the calls that begin with one of ``markers``.

    ``read`` reads the calls after a marker. What begins like a call and is none is emitted as text, so nothing is lost.
    If the beginning of such a call has been told, only the rest is emitted.
    """
    while marker := (yield from reader.show_until(*markers)):
        try:
            calls = yield from read(marker)
        except Incomplete:
            is_told = reader.break_call()
            # Nothing but the marker is no text either.
            if not reader.is_cut and (is_told or reader.text.removeprefix(marker).strip(SPACE)):
                reader.emit_text(reader.text)
            reader.at = len(reader.text)
        except Malformed:
            if reader.break_call():
                reader.at = 0
            reader.emit_text(reader.text[: reader.at])
        else:
            for call in calls:
                reader.emit_call(call)
        reader.drop_read()


def only_text(reader: Reader) -> Parser:
    """Emit the rest of the answer as text, as it arrives."""
    yield from reader.show_until()
