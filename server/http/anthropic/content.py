"""Writes the content blocks of an answer.

A block is started, gets deltas, and is stopped:

    content_block_start ──▶ content_block_delta* ──▶ content_block_stop

A whole answer is the fold of the same events, so both have the same blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import orjson

from ...output_parsers.events import (
    CallEvent,
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCall,
    ToolCallEnded,
    ToolCallStarted,
)
from ..generation.tool_use import part_id

BlockEvent = dict[str, Any]
TEXT, THINKING = "text", "thinking"


class ContentBlocks:
    """The content blocks of one answer, one of which may be open.

    Ids of calls and signatures of thinking derive from ``rid`` and a number, so an answer that goes on at another
    instance keeps them. ``shows_thinking``: whether there are blocks of thinking. ``omits_thought``: whether they leave
    out their text.
    """

    def __init__(self, rid: str, *, shows_thinking: bool, omits_thought: bool) -> None:
        self._rid = rid
        self._shows_thinking = shows_thinking
        self._omits_thought = omits_thought
        self._index = -1
        self._open = ""
        """Type of the open block; "" if none is open."""

    def add(self, events: Sequence[OutputEvent]) -> Iterator[BlockEvent]:
        """Yield what the ``events`` of an answer do to its blocks: start, delta and stop."""
        for event in events:
            if isinstance(event, TextDelta):
                if event.text:
                    yield from self._start(TEXT, {"text": ""})
                    yield self._delta({"type": "text_delta", "text": event.text})
            elif isinstance(event, ReasoningDelta):
                if self._shows_thinking:
                    yield from self._think(event.text)
            else:
                yield from self._call(event)

    def end(self) -> Iterator[BlockEvent]:
        """Yield the end of the open block; nothing if none is open."""
        if self._open == THINKING:
            signature = part_id(self._rid, THINKING, self._index)
            yield self._delta({"type": "signature_delta", "signature": signature})
        if self._open:
            self._open = ""
            yield {"type": "content_block_stop", "index": self._index}

    def _think(self, thought: str) -> Iterator[BlockEvent]:
        yield from self._start(THINKING, {"thinking": "", "signature": ""})
        if not self._omits_thought:
            yield self._delta({"type": "thinking_delta", "thinking": thought})

    def _call(self, event: CallEvent) -> Iterator[BlockEvent]:
        if isinstance(event, ToolCall | ToolCallStarted):
            name = f"toolu_{part_id(self._rid, 0, event.number)}"
            call = {"id": name, "name": event.name, "input": {}, "caller": {"type": "direct"}}
            yield from self._start("tool_use", call)
        if isinstance(event, ToolCall | ToolArgumentsDelta):
            text = event.arguments if isinstance(event, ToolCall) else event.text
            yield self._delta({"type": "input_json_delta", "partial_json": text})
        if isinstance(event, ToolCall | ToolCallEnded):
            yield from self.end()

    def _start(self, kind: str, fields: dict[str, Any]) -> Iterator[BlockEvent]:
        """Start a block of type ``kind`` after the end of the open one, unless that is of the same type."""
        if self._open == kind:
            return
        yield from self.end()
        self._index, self._open = self._index + 1, kind
        yield {"type": "content_block_start", "index": self._index, "content_block": {"type": kind, **fields}}

    def _delta(self, delta: dict[str, str]) -> BlockEvent:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def fold(events: Iterable[BlockEvent]) -> list[dict[str, Any]]:
    """Return the blocks that ``events`` add up to, JSON-ready: the content of a whole answer."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"]})
        elif event["type"] == "content_block_delta":
            block, delta = blocks[-1], event["delta"]
            if delta["type"] == "input_json_delta":
                # As the model wrote it: a number may be larger than any type of JSON libraries.
                block["input"] = orjson.Fragment(delta["partial_json"])
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
    return blocks
