"""What an output parser finds in the text of an answer."""

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


OutputEvent = TextDelta | ReasoningDelta | ToolCall
