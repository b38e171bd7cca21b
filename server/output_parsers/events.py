"""What an output parser finds in the text of an answer.

A call is found as a whole, or while the model writes it:

    ToolCall
    ToolCallStarted ──▶ ToolArgumentsDelta* ──▶ ToolCallEnded
"""

from __future__ import annotations

from typing import NamedTuple


class TextDelta(NamedTuple):
    """Text that is meant for the user."""

    text: str


class ReasoningDelta(NamedTuple):
    """Text that the model wrote for itself, before its answer."""

    text: str


class ToolCall(NamedTuple):
    """A complete call of a tool. ``arguments``: a JSON object, as text. ``number``: place among the answer's calls."""

    name: str
    arguments: str
    number: int = 0


class ToolCallStarted(NamedTuple):
    """The beginning of a call. Its arguments follow in pieces."""

    name: str
    number: int


class ToolArgumentsDelta(NamedTuple):
    """The next piece of a call's arguments."""

    text: str
    number: int


class ToolCallEnded(NamedTuple):
    """The end of a call that came in pieces.

    ``is_complete``: False if the answer broke off, or if what followed was no call any more. The pieces are no JSON
    then: they lack at least the brace that ends the object.
    """

    number: int
    is_complete: bool


CallEvent = ToolCall | ToolCallStarted | ToolArgumentsDelta | ToolCallEnded
OutputEvent = TextDelta | ReasoningDelta | CallEvent
