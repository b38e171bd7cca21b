"""Reads the events of an answer (text, reasoning, tool calls) out of the text that the engine sends.

A whole answer is read as a stream of one piece. Only its calls differ: they are complete, while those of a stream may
come in pieces, and break off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, NamedTuple, Protocol

from ....messages.outputs import FinishReason, FinishType
from ....messages.sampling import OutputMarks
from ...output_parsers.base import OutputFormat, OutputParser, ParseRequest
from ...output_parsers.choice import marks_of
from ...output_parsers.events import OutputEvent, TextDelta
from ..engine.submission import Choice, Delta


class ReadEvents(NamedTuple):
    """Events of one delta. ``sent``: those of text that another instance has sent to the client."""

    sent: Sequence[OutputEvent]
    new: Sequence[OutputEvent]


class OutputReader(Protocol):
    """Reads the answers of one request."""

    @property
    def marks(self) -> OutputMarks | None:
        """Return what the detokenizer has to know of the answer's format; None: nothing."""

    def read(self, delta: Delta) -> Sequence[OutputEvent]:
        """Return the events (text, reasoning, tool calls) that ``delta`` adds to a streamed choice."""

    def read_all(self, delta: Delta) -> ReadEvents:
        """Return what ``read`` does, and apart from it the events that the client already has from another instance.

        Such events come first if a stream has moved here. A writer that numbers parts must count them.
        """

    def read_whole(self, choice: Choice) -> Sequence[OutputEvent]:
        """Return all events (text, reasoning, tool calls) of a choice that has finished."""

    def has_calls(self, choice: Choice) -> bool:
        """Return whether a choice has called a tool so far, also where another instance has sent the call."""


class PlainReader:
    """Takes all of an answer for text."""

    marks: ClassVar[None] = None

    @staticmethod
    def read(delta: Delta) -> Sequence[OutputEvent]:
        """Return the new text as one event; nothing for an empty delta."""
        return PlainReader._events(delta.text)

    @staticmethod
    def read_all(delta: Delta) -> ReadEvents:
        """Return the text that another instance has sent, and the new text, as one event each; none for no text."""
        return ReadEvents(PlainReader._events(delta.sent_before), PlainReader._events(delta.text))

    @staticmethod
    def _events(text: str) -> Sequence[OutputEvent]:
        return (TextDelta(text),) if text else ()

    @staticmethod
    def read_whole(choice: Choice) -> Sequence[OutputEvent]:
        """Return the whole text of the choice as one event."""
        return (TextDelta(choice.text),)

    @staticmethod
    def has_calls(choice: Choice) -> bool:
        """Return False: plain text has no tool calls."""
        return False


class ParsedReader:
    """Reads answers by the format of the model.

    ``streams_arguments``: in streams, tell the arguments of calls while the model writes them.
    """

    def __init__(self, output_format: OutputFormat, request: ParseRequest, *, streams_arguments: bool = False) -> None:
        self.marks = marks_of(output_format)
        self._format = output_format
        self._request = request
        self._streams_arguments = streams_arguments
        self._parsers: dict[int, OutputParser] = {}

    def read(self, delta: Delta) -> Sequence[OutputEvent]:
        """Parse what is new of a choice, and return the events that are certain by now; the last delta brings the rest.

        Text that another instance has sent is parsed, but its events are not returned.
        """
        return self.read_all(delta).new

    def read_all(self, delta: Delta) -> ReadEvents:
        """Parse a delta. Return the events of text that another instance has sent, and those that ``read`` returns."""
        choice = delta.choice
        parser = self._parsers.get(choice.index)
        if parser is None:
            parser = self._parsers[choice.index] = self._parser(choice, streams_arguments=self._streams_arguments)
        sent = parser.feed(delta.sent_before) if delta.sent_before else []
        events = parser.feed(delta.text) if delta.text else []
        if delta.finish is not None:
            events += parser.end(is_cut=is_cut(delta.finish))
        return ReadEvents(sent, events)

    def read_whole(self, choice: Choice) -> Sequence[OutputEvent]:
        """Parse the whole text of a finished choice, and return all its events.

        A new parser replaces that of its deltas.
        """
        parser = self._parsers[choice.index] = self._parser(choice, streams_arguments=False)
        finish = choice.finish
        return [*parser.feed(choice.text), *parser.end(is_cut=finish is not None and is_cut(finish))]

    def has_calls(self, choice: Choice) -> bool:
        """Return whether the choice's parser has found a tool call so far."""
        parser = self._parsers.get(choice.index)
        return parser is not None and parser.calls > 0

    def _parser(self, choice: Choice, *, streams_arguments: bool) -> OutputParser:
        begins = choice.reasoning is not None and choice.reasoning.begins_open
        request = replace(self._request, begins_in_reasoning=begins, streams_arguments=streams_arguments)
        return OutputParser(self._format, request)


def is_cut(finish: FinishReason) -> bool:
    """Return whether a limit or an abort has ended an answer, and not the model or a stop string."""
    return finish.type is not FinishType.STOP
