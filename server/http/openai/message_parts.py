"""The parts of an assistant's message: text, reasoning and tool calls."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from ....messages.decode import shown
from ....messages.grammar import MAX_GRAMMAR_CHARACTERS, Grammar
from ...output_parsers.base import ParseRequest
from ...output_parsers.choice import OutputFormats
from ...output_parsers.events import OutputEvent, ReasoningDelta, TextDelta, ToolCall
from ...output_parsers.forced import forced_calls
from ..engine.submission import Choice
from ..errors import bad_request
from ..generation.output_reader import OutputReader, ParsedReader, PlainReader
from .schemas import ChatBody
from .tools import NamedToolChoice, schemas_of

NO_TOOLS = "the model's chat template has no tools; start the server with --chat-template FILE"


def chat_reader(body: ChatBody, formats: OutputFormats) -> OutputReader:
    """Choose the reader that splits the answers to ``body`` into text, reasoning and tool calls.

    ``formats``: the model's. Raises ``ApiError`` 400 for tools that the model's template or format does not support.
    """
    choice = body.tool_choice
    tools = body.tools if choice != "none" else []
    if tools and not formats.renders_tools:
        raise bad_request("tools", NO_TOOLS)
    if tools and formats.calls is None:
        raise bad_request(
            "tools", "the format of this model's tool calls is not known; start the server with --tool-call-parser"
        )
    separates = body.separate_reasoning or not body.include_reasoning
    output_format = formats.for_request(has_tools=bool(tools), separates_reasoning=separates)
    if output_format is None:
        return PlainReader()
    return ParsedReader(output_format, ParseRequest(schemas_of(tools), separates_reasoning=separates))


def forced_call(body: ChatBody, formats: OutputFormats) -> Grammar | None:
    """Return the grammar of the tool calls that ``tool_choice`` forces; None if it forces none.

    Raises ``ApiError`` 400 for an unknown tool, a format of calls that can't be forced, or too large a grammar.
    """
    choice, tools = body.tool_choice, schemas_of(body.tools)
    if choice in (None, "none", "auto") or formats.calls is None:
        return None
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        if name not in tools:
            raise bad_request("tool_choice", f"names {shown(name, 64)!r}, which is not among the tools")
        tools = {name: tools[name]}
    many = body.parallel_tool_calls and choice == "required"
    if (grammar := forced_calls(formats.calls, tools, many=many)) is None:
        raise bad_request(
            "tool_choice", f'must be "auto" or "none": calls in the format {formats.calls.name} can\'t be forced yet'
        )
    if len(grammar.source) > MAX_GRAMMAR_CHARACTERS:
        raise bad_request(
            "tools",
            f"make a grammar of {len(grammar.source)} characters for tool_choice; the limit is "
            f"{MAX_GRAMMAR_CHARACTERS}; give fewer tools, or shorter descriptions in their parameters",
        )
    return grammar


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
        name = hashlib.blake2b(f"{self._rid}/{choice.index}/{call.number}".encode(), digest_size=12).hexdigest()
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": call.number, "id": f"call_{name}", "type": "function", "function": function}
