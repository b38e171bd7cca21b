"""Answers by an output parser: in one piece, and in pieces of random sizes."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pdserve.server.output_parsers.base import OutputFormat, OutputParser, ParseRequest
from pdserve.server.output_parsers.events import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCall,
    ToolCallEnded,
    ToolCallStarted,
)


class Parts(NamedTuple):
    """The parts of an answer, each joined."""

    text: str
    reasoning: str
    calls: list[ToolCall]
    broken: Sequence[ToolCall] = ()
    """Calls that were begun and are not complete."""


def parts_of(events: Iterable[OutputEvent]) -> Parts:
    """Fold events, as clients do. Assert that calls come in order, and that text never comes within one."""
    text, reasoning = "", ""
    calls: dict[int, ToolCall] = {}
    broken: list[ToolCall] = []
    is_open = False
    for event in events:
        assert not is_open or isinstance(event, ToolArgumentsDelta | ToolCallEnded)
        if isinstance(event, TextDelta):
            text += event.text
        elif isinstance(event, ReasoningDelta):
            reasoning += event.text
        elif isinstance(event, ToolCall | ToolCallStarted):
            assert event.number == len(calls) + len(broken)
            is_open = isinstance(event, ToolCallStarted)
            calls[event.number] = ToolCall(event.name, "", event.number) if is_open else event
        else:
            assert is_open
            assert event.number == max(calls)
            call = calls[event.number]
            if isinstance(event, ToolArgumentsDelta):
                assert event.text
                calls[event.number] = call._replace(arguments=call.arguments + event.text)
                continue
            is_open = False
            if not event.is_complete:
                broken.append(calls.pop(event.number))
    if is_open:
        broken.append(calls.pop(max(calls)))
    return Parts(text, reasoning, [*calls.values()], tuple(broken))


def read(output_format: OutputFormat, request: ParseRequest, pieces: Sequence[str], *, is_cut: bool = False) -> Parts:
    """Parse an answer that comes in pieces."""
    parser = OutputParser(output_format, request)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return parts_of(events + parser.end(is_cut=is_cut))


def random_pieces(text: str, seed: int, most: int) -> list[str]:
    """Cut a text into pieces of 1 to ``most`` characters."""
    rng, pieces = random.Random(seed), list[str]()
    while text:
        size = rng.randint(1, most)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def read_every_way(output_format: OutputFormat, request: ParseRequest, text: str, *, is_cut: bool = False) -> Parts:
    """Parse a text whole and in pieces; assert that all ways give the same parts."""
    whole = read(output_format, request, [text], is_cut=is_cut)
    for seed, most in enumerate((1, 2, 3, 5, 8, 13, 40)):
        assert read(output_format, request, random_pieces(text, seed, most), is_cut=is_cut) == whole
    return whole
