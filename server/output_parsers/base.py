"""An output format: how a family of models marks reasoning and tool calls in its text, and the parser that reads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .events import OutputEvent
from .reader import Parser, Reader

Tools = Mapping[str, Mapping[str, Any]]
"""JSON schema of each tool's parameters, by the tool's name."""

MAX_PIECE = 1 << 14
"""Characters that a parser gets at once. It cuts off what it has read, after each call, which copies the rest."""


@dataclass(frozen=True)
class ParseRequest:
    """What a request asks of its parser."""

    tools: Tools = field(default_factory=dict)
    """Tools that the model may call; without any, nothing is read as a call."""
    begins_in_reasoning: bool = False
    """Whether the prompt ends within reasoning."""
    separates_reasoning: bool = True
    """Whether reasoning is kept apart from the text."""
    most_calls: int | None = None
    """Maximum complete calls of an answer. Further ones are left out. None: there is no maximum."""
    streams_arguments: bool = False
    """Whether arguments of calls are told as they arrive, where the format has them in JSON.

    Then a call that breaks off is told in part. Otherwise, calls are told when they are complete.
    """


@dataclass(frozen=True)
class CallShape:
    """How a format writes calls with arguments in JSON. ``NAME`` in ``before`` stands for the tool's name."""

    before: str
    """Text before the arguments."""
    after: str = ""
    """Text after the arguments."""
    prefix: str = ""
    """Text before all calls."""
    suffix: str = ""
    """Text after all calls."""
    separator: str | None = None
    """Text between calls; None: an answer has one call only."""
    has_json_names: bool = True
    """Whether names are in JSON strings."""

    def written(self, name: str) -> str:
        """Return a tool's name as a call contains it: escaped for a JSON string, or as it is."""
        return json.dumps(name, ensure_ascii=False)[1:-1] if self.has_json_names else name


@dataclass(frozen=True)
class OutputFormat:
    """One format. ``name``: value of ``--tool-call-parser`` and ``--reasoning-parser``."""

    name: str
    parse: Callable[[Reader, ParseRequest], Parser]
    shown: tuple[str, ...] = ()
    """Special tokens that the parser needs to see. Answers contain no other special tokens."""
    reasoning: tuple[str, str] = ("", "")
    """Text that begins and ends reasoning; empty for a format without."""
    signs: Sequence[Sequence[str]] = ()
    """Alternatives. The chat template of such a model contains all texts of one of them.

    Strings of the template count as it prints them, and whitespace as one space.
    """
    shape: CallShape | None = None
    """How calls are written that ``tool_choice`` forces; None: they cannot be forced."""


class OutputParser:
    """Reads one answer. Events depend on the text alone, not on its pieces."""

    def __init__(self, output_format: OutputFormat, request: ParseRequest) -> None:
        self._reader = Reader(streams_arguments=request.streams_arguments, most_calls=request.most_calls)
        self._parser = output_format.parse(self._reader, request)
        self._is_done = False
        self._advance()

    @property
    def calls(self) -> int:
        """Return the number of complete tool calls found so far."""
        return self._reader.calls

    def feed(self, text: str) -> list[OutputEvent]:
        """Take the next piece of the answer's text. Return the new events, which later text cannot change."""
        for at in range(0, len(text), MAX_PIECE):
            self._reader.append(text[at : at + MAX_PIECE])
            self._advance()
        return self._taken()

    def end(self, *, is_cut: bool = False) -> list[OutputEvent]:
        """Return the last events, once no more text follows.

        ``is_cut``: the answer ended because of a limit. The rest of an incomplete call is dropped then: the model never
        finished it, and no client can use half of one.
        """
        self._reader.has_ended, self._reader.is_cut = True, is_cut
        self._advance()
        self._reader.finish()
        return self._taken()

    def _advance(self) -> None:
        if not self._is_done:
            self._is_done = next(self._parser, self) is self

    def _taken(self) -> list[OutputEvent]:
        events, self._reader.events = self._reader.events, []
        return events
