"""The parts of an assistant's message: text, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....messages.grammar import Grammar
from ...output_parsers.choice import OutputFormats
from ...output_parsers.events import OutputEvent, ReasoningDelta, TextDelta, ToolCall
from ..engine.submission import Choice
from ..generation.output_reader import OutputReader
from ..generation.tool_calls import ANY_TOOL, call_id, choose_reader, force_call
from .schemas import ChatBody
from .tools import NamedToolChoice, schemas_of


def chat_reader(body: ChatBody, formats: OutputFormats) -> OutputReader:
    """Choose the reader that splits the answers to ``body`` into text, reasoning and tool calls.

    ``formats``: the model's. Raises ``ApiError`` 400 for tools that the model's template or format does not support.
    """
    tools = schemas_of(body.tools) if body.tool_choice != "none" else {}
    separates = body.separate_reasoning or not body.include_reasoning
    return choose_reader(tools, formats, separates_reasoning=separates)


def forced_call(body: ChatBody, formats: OutputFormats) -> Grammar | None:
    """Return the grammar of the tool calls that ``tool_choice`` forces; None if it forces none.

    Raises ``ApiError`` 400 for an unknown tool, a format of calls that can't be forced, or too large a grammar.
    """
    choice = body.tool_choice
    forced = ANY_TOOL if choice == "required" else choice.function.name if isinstance(choice, NamedToolChoice) else None
    return force_call(forced, schemas_of(body.tools), formats, many=body.parallel_tool_calls)


class MessageParts:
    """Writes the parts of one request's messages in OpenAI's shape.

    Ids of calls derive from the request's, so an answer that goes on at another instance keeps them.
    """

    def __init__(self, rid: str, *, parallel_calls: bool, includes_reasoning: bool) -> None:
        self._rid = rid
        self._most_calls = None if parallel_calls else 1
        self._includes_reasoning = includes_reasoning

    def whole(self, choice: Choice, events: Sequence[OutputEvent]) -> dict[str, Any]:
        """Return the assistant's message of a finished choice, JSON-ready. ``events``: all events of its output."""
        parts = self.new(choice, events)
        calls = parts.get("tool_calls", ())
        for call in calls:
            del call["index"]
        content = parts.get("content")
        return {"role": "assistant", **parts, "content": content if content is not None or calls else ""}

    def new(self, choice: Choice, events: Sequence[OutputEvent]) -> dict[str, Any]:
        """Return the fields that ``events`` add to a choice's message: text, reasoning and tool calls.

        Reasoning that the client does not want is left out, and so are further calls if it allows only one.
        """
        parts: dict[str, Any] = {}
        for event in events:
            if isinstance(event, TextDelta):
                parts["content"] = parts.get("content", "") + event.text
            elif isinstance(event, ReasoningDelta):
                if self._includes_reasoning:
                    parts["reasoning_content"] = parts.get("reasoning_content", "") + event.text
            elif (call := self._call(choice, event)) is not None:
                parts.setdefault("tool_calls", []).append(call)
        return parts

    def _call(self, choice: Choice, call: ToolCall) -> dict[str, Any] | None:
        if self._most_calls is not None and call.number >= self._most_calls:
            return None
        function = {"name": call.name, "arguments": call.arguments}
        return {
            "index": call.number,
            "id": call_id(self._rid, choice.index, call.number),
            "type": "function",
            "function": function,
        }
