"""The parts of an assistant's message: text, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...output_parsers.events import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCall,
    ToolCallEnded,
    ToolCallStarted,
)
from ..engine.submission import Choice
from ..generation.tool_use import ToolUse, part_id
from .schemas import ChatBody
from .tools import NamedToolChoice, schemas_of


def tool_use_of(body: ChatBody) -> ToolUse:
    """Return what ``body`` says about tools. With the ``tool_choice`` "none" there are none."""
    choice = body.tool_choice
    if choice == "none":
        return ToolUse()
    only = choice.function.name if isinstance(choice, NamedToolChoice) else None
    is_forced = choice not in (None, "auto")
    return ToolUse(schemas_of(body.tools), is_forced, only, body.parallel_tool_calls)


class MessageParts:
    """Writes the parts of one request's messages in OpenAI's shape.

    Ids of calls derive from the request's, so an answer that goes on at another instance keeps them.
    """

    def __init__(self, rid: str, *, includes_reasoning: bool) -> None:
        self._rid = rid
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

        Reasoning that the client does not want is left out.
        """
        parts: dict[str, Any] = {}
        for event in events:
            if isinstance(event, TextDelta):
                parts["content"] = parts.get("content", "") + event.text
            elif isinstance(event, ReasoningDelta):
                if self._includes_reasoning:
                    parts["reasoning_content"] = parts.get("reasoning_content", "") + event.text
            elif not isinstance(event, ToolCallEnded):
                self._add_call(choice, event, parts.setdefault("tool_calls", []))
        return parts

    def _add_call(
        self, choice: Choice, event: ToolCall | ToolCallStarted | ToolArgumentsDelta, calls: list[dict[str, Any]]
    ) -> None:
        """Add to ``calls`` what ``event`` tells of a call. Arguments that belong to its last entry are joined to it."""
        if isinstance(event, ToolArgumentsDelta):
            if calls and calls[-1]["index"] == event.number:
                calls[-1]["function"]["arguments"] += event.text
            else:
                calls.append({"index": event.number, "function": {"arguments": event.text}})
        else:
            name = part_id(self._rid, choice.index, event.number)
            function = {"name": event.name, "arguments": event.arguments if isinstance(event, ToolCall) else ""}
            calls.append({"index": event.number, "id": f"call_{name}", "type": "function", "function": function})
