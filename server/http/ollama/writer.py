"""Writes Ollama's answers: one object, or a line of JSON for each event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar, Protocol

import orjson

from ....messages.outputs import FinishReason, FinishType, Timing
from ...output_parsers.events import OutputEvent, ReasoningDelta, TextDelta, ToolCall
from ..engine.submission import Choice, Delta
from ..generation.output_reader import OutputReader
from ..generation.tool_use import part_id

NS_PER_MS = 1_000_000
SHARED_NAMES = {"stop": "options.stop", "chat_template_kwargs": "think"}
"""Clients' names of the fields that the tokenizer process checks."""

LINE_ENDS = {character.encode(): f"\\u{ord(character):04x}".encode() for character in "\u0085\u2028\u2029"}
"""JSON escapes of characters that JSON leaves as they are, and at which Ollama's own client ends a line."""


class Parts(Protocol):
    """The place of text, reasoning and tool calls in the answers of one endpoint."""

    @property
    def field_names(self) -> Mapping[str, str]:
        """Return the endpoint's names of the engine's fields, by the engine's names."""

    def write(self, text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the parts as fields of an answer, or of a line of a stream."""


class ChatParts:
    """Parts of a chat's answer: a message."""

    field_names: ClassVar[Mapping[str, str]] = {"text": "messages", "input_ids": "messages", **SHARED_NAMES}

    @staticmethod
    def write(text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the field ``message``."""
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = calls
        return {"message": message}


class PromptParts:
    """Parts of the answer to a prompt, which has no tool calls."""

    field_names: ClassVar[Mapping[str, str]] = {
        "text": "prompt",
        "input_ids": "prompt",
        "messages": "prompt",
        **SHARED_NAMES,
    }

    @staticmethod
    def write(text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the field ``response``, and ``thinking`` if there is any."""
        return {"response": text, **({"thinking": thinking} if thinking else {})}


class OllamaRenderer:
    """Writes whole answers, and the lines of streams.

    ``name``: the model's, as the client wrote it. Ids of calls derive from the request's, so an answer that goes on at
    another instance keeps them.
    """

    created, repeats = 0, False

    def __init__(self, name: str, rid: str, reader: OutputReader, parts: Parts) -> None:
        self._name = name
        self._rid = rid
        self._reader = reader
        self._parts = parts

    @property
    def field_names(self) -> Mapping[str, str]:
        """Return the endpoint's names of the engine's fields, by the engine's names."""
        return self._parts.field_names

    def answer(self, choices: list[Choice]) -> dict[str, Any]:
        """Return the whole answer, JSON-ready: its one choice, which has finished."""
        (choice,) = choices
        parts = self._write(choice, self._reader.read_whole(choice))
        return {**self._head(), **parts, **finished(choice)}

    def events(self, delta: Delta) -> bytes:
        """Encode the line with what is new of the choice; no bytes for tokens that show nothing yet."""
        events = self._reader.read(delta)
        return self._line(self._write(delta.choice, events), {"done": False}) if events else b""

    def last_events(self, choices: list[Choice]) -> bytes:
        """Encode the last line, with counts and durations."""
        (choice,) = choices
        return self._line(self._write(choice, ()), finished(choice))

    def _head(self) -> dict[str, Any]:
        return {"model": self._name, "created_at": now()}

    def _line(self, parts: dict[str, Any], end: dict[str, Any]) -> bytes:
        line = orjson.dumps({**self._head(), **parts, **end}, option=orjson.OPT_APPEND_NEWLINE)
        for character, escape in LINE_ENDS.items():
            line = line.replace(character, escape)
        return line

    def _write(self, choice: Choice, events: Sequence[OutputEvent]) -> dict[str, Any]:
        text, thinking, calls = "", "", []
        for event in events:
            if isinstance(event, TextDelta):
                text += event.text
            elif isinstance(event, ReasoningDelta):
                thinking += event.text
            elif isinstance(event, ToolCall):
                function = {"index": event.number, "name": event.name, "arguments": _arguments(event)}
                call_id = part_id(self._rid, choice.index, event.number)
                calls.append({"id": f"call_{call_id}", "function": function})
        return self._parts.write(text, thinking, calls)


def _arguments(call: ToolCall) -> orjson.Fragment:
    """Return the arguments of a call as the model wrote them, but on one line. JSON has line ends only in white space.

    Decoded, a number larger than any type of JSON libraries would become another one.
    """
    return orjson.Fragment(call.arguments.replace("\n", " ").replace("\r", " "))


def finished(choice: Choice) -> dict[str, Any]:
    """Return the fields that end the answer of a finished choice: why it ended, counts and durations."""
    spent = choice.meta.timing if choice.meta is not None else Timing()
    # A moved request's phases include message delays: they may sum to a little more.
    total = max(choice.seconds * 1000, sum(one.ms for one in spent.phases))
    return {
        "done": True,
        **_reason(choice.finish),
        "total_duration": int(total * NS_PER_MS),
        # The model was loaded before.
        "load_duration": 0,
        "prompt_eval_count": choice.prompt_tokens or 0,
        "prompt_eval_duration": int(spent.prefill_ms * NS_PER_MS),
        "eval_count": choice.completion_tokens,
        "eval_duration": int(spent.decode_ms * NS_PER_MS),
    }


def _reason(finish: FinishReason | None) -> dict[str, Any]:
    """Return why an answer ended. "length" is Ollama's only word for one that is incomplete."""
    if finish is None or finish.type is FinishType.STOP:
        return {"done_reason": "stop"}
    if finish.type is FinishType.LENGTH:
        return {"done_reason": "length"}
    return {"done_reason": "length", "pdserve_finish": {"type": finish.type.value, "message": finish.message}}


def now() -> str:
    """Return the current time as Ollama writes it: RFC 3339, in UTC."""
    return rfc3339(datetime.now(UTC))


def rfc3339(time: datetime) -> str:
    """Return a time in UTC in the format of RFC 3339, with microseconds."""
    return time.isoformat(timespec="microseconds").replace("+00:00", "Z")
