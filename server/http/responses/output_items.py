"""Folds an answer's text, reasoning and tool calls to the items of a response, and tells each step as an event.

    closed ──text──▶ message ──▶ reasoning or call comes, or the answer ends ──▶ closed
    closed ──reasoning──▶ reasoning ──▶ text or call comes, or the answer ends ──▶ closed
    closed ──call──▶ call ──▶ call has ended ──▶ closed

A call that comes whole and that no request may send back, such as one nested too deep, is written as text.

Ids derive from the request's id and the item's place. So an answer that goes on at another instance keeps them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from ...output_parsers.events import (
    CallEvent,
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCall,
    ToolCallStarted,
)
from ..bodies.tool_fields import decode_arguments
from ..generation.tool_use import part_id
from .sealed import seal

ID_PREFIX = "resp_"
"""Prefix of the ids of responses."""
Event = dict[str, Any]
"""An event without its ``sequence_number``."""


@dataclass
class _OpenItem:
    """A message or reasoning that grows."""

    is_reasoning: bool
    id: str
    pieces: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """First part of the types of its text's events."""
        return "response.reasoning_text" if self.is_reasoning else "response.output_text"

    def part(self, text: str) -> dict[str, Any]:
        """Return the item's only content part, with ``text``."""
        if self.is_reasoning:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def logprobs(self) -> dict[str, Any]:
        """Return the field that only events of an output's text have besides: no log-probabilities."""
        return {} if self.is_reasoning else {"logprobs": []}


@dataclass
class _OpenCall:
    """A call with growing arguments. ``item``: the item's fields that do not change."""

    item: dict[str, Any]
    pieces: list[str] = field(default_factory=list)

    def written(self, arguments: str, status: str) -> dict[str, Any]:
        """Return the item with ``arguments`` and ``status``."""
        return {**self.item, "arguments": arguments, "status": status}


class OutputItems:
    """The items of one response. ``seals``: whether reasoning has ``encrypted_content``."""

    def __init__(self, rid: str, *, seals: bool) -> None:
        self._rid = rid
        self._base = rid.removeprefix(ID_PREFIX)
        self._seals = seals
        self._open: _OpenItem | None = None
        self._open_call: _OpenCall | None = None
        self.items: list[dict[str, Any]] = []
        """Items that are complete."""

    def add(self, event: OutputEvent) -> list[Event]:
        """Add what is new of the answer, and return the events that tell it."""
        if isinstance(event, TextDelta | ReasoningDelta):
            return self._grow(event.text, is_reasoning=isinstance(event, ReasoningDelta))
        return self._add_call(event)

    def end(self, *, is_cut: bool) -> list[Event]:
        """Complete the item that is open, and return the events that tell it. ``is_cut``: the answer is incomplete."""
        return self._close("incomplete" if is_cut else "completed")

    def _grow(self, text: str, *, is_reasoning: bool) -> list[Event]:
        if not text:
            return []
        item, events = self._open, []
        if item is None or item.is_reasoning != is_reasoning:
            events = self._close("completed")
            item = self._open = _OpenItem(is_reasoning, self._id("rs" if is_reasoning else "msg"))
            events += self._begun(item)
        item.pieces.append(text)
        return [*events, self._told(item, f"{item.kind}.delta", delta=text, **item.logprobs())]

    def _begun(self, item: _OpenItem) -> list[Event]:
        return [
            self._item("added", self._written(item, [], "in_progress")),
            self._told(item, "response.content_part.added", part=item.part("")),
        ]

    def _close(self, status: str) -> list[Event]:
        item, self._open = self._open, None
        if item is None:
            return []
        text = "".join(item.pieces)
        part = item.part(text)
        events = [
            self._told(item, f"{item.kind}.done", text=text, **item.logprobs()),
            self._told(item, "response.content_part.done", part=part),
        ]
        return [*events, self._done(self._written(item, [part], status))]

    def _add_call(self, event: CallEvent) -> list[Event]:
        if isinstance(event, ToolCall):
            if not _can_be_sent_back(event.name, event.arguments):
                text = f'{{"name": {json.dumps(event.name)}, "arguments": {event.arguments}}}'
                return self._grow(text, is_reasoning=False)
            begun = self._start_call(event.name, event.number)
            return [*begun, *self._grow_call(event.arguments), *self._end_call(is_complete=True)]
        if isinstance(event, ToolCallStarted):
            return self._start_call(event.name, event.number)
        if isinstance(event, ToolArgumentsDelta):
            return self._grow_call(event.text)
        return self._end_call(is_complete=event.is_complete)

    def _start_call(self, name: str, number: int) -> list[Event]:
        events = self._close("completed")
        call_id = f"call_{part_id(self._rid, 0, number)}"
        call = _OpenCall({"id": self._id("fc"), "type": "function_call", "call_id": call_id, "name": name})
        self._open_call = call
        return [*events, self._item("added", call.written("", "in_progress"))]

    def _grow_call(self, text: str) -> list[Event]:
        assert self._open_call is not None
        self._open_call.pieces.append(text)
        return [self._told_call("delta", delta=text)]

    def _end_call(self, *, is_complete: bool) -> list[Event]:
        assert self._open_call is not None
        call, arguments = self._open_call, "".join(self._open_call.pieces)
        name = call.item["name"]
        status = "completed" if is_complete and _can_be_sent_back(name, arguments) else "incomplete"
        told = self._told_call("done", name=name, arguments=arguments)
        self._open_call = None
        return [told, self._done(call.written(arguments, status))]

    def _told_call(self, step: str, **fields: Any) -> Event:
        assert self._open_call is not None
        place = {"item_id": self._open_call.item["id"], "output_index": len(self.items)}
        return {"type": f"response.function_call_arguments.{step}", **place, **fields}

    def _written(self, item: _OpenItem, content: list[dict[str, Any]], status: str) -> dict[str, Any]:
        if not item.is_reasoning:
            return {"id": item.id, "type": "message", "status": status, "role": "assistant", "content": content}
        return {
            "id": item.id,
            "type": "reasoning",
            "status": status,
            "summary": [],
            "content": content,
            # Open Responses has no null here.
            **({"encrypted_content": seal(content[0]["text"])} if self._seals and content else {}),
        }

    def _id(self, kind: str) -> str:
        return f"{kind}_{self._base}_{len(self.items)}"

    def _told(self, item: _OpenItem, kind: str, **fields: Any) -> Event:
        return {"type": kind, "item_id": item.id, "output_index": len(self.items), "content_index": 0, **fields}

    def _item(self, step: str, item: dict[str, Any]) -> Event:
        return {"type": f"response.output_item.{step}", "output_index": len(self.items), "item": item}

    def _done(self, item: dict[str, Any]) -> Event:
        event = self._item("done", item)
        self.items.append(item)
        return event


def _can_be_sent_back(name: str, arguments: str) -> bool:
    """Return whether a request may have a call with these arguments. None could go on after one that it may not."""
    try:
        decode_arguments(name, arguments)
    except ValueError:
        return False
    return True
