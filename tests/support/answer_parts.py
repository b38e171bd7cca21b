"""Answers by an output parser: in one piece, and in pieces of random sizes."""

from __future__ import annotations

import random
from typing import NamedTuple

from pdserve.server.output_parsers.base import OutputFormat, OutputParser, ParseRequest
from pdserve.server.output_parsers.events import OutputEvent, ReasoningDelta, TextDelta, ToolCall


class Parts(NamedTuple):
    """The parts of an answer, each joined."""

    text: str
    reasoning: str
    calls: list[ToolCall]


def parts_of(events: list[OutputEvent]) -> Parts:
    """Fold events."""
    return Parts(
        "".join(one.text for one in events if isinstance(one, TextDelta)),
        "".join(one.text for one in events if isinstance(one, ReasoningDelta)),
        [one for one in events if isinstance(one, ToolCall)],
    )


def read(output_format: OutputFormat, request: ParseRequest, pieces: list[str], *, is_cut: bool = False) -> Parts:
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
