"""Streams of the Responses API, read as its clients read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from pdserve.server.http.responses.answers import ResponseEvent

LAST = ("response.completed", "response.incomplete", "response.failed")
GROWING = {"response.output_text": "text", "response.reasoning_text": "text", "response.function_call_arguments": ""}


def events_of(text: str, first: int = 0) -> list[dict[str, Any]]:
    """Return a stream's events, without comments and errors. ``first``: number of the first one.

    Each has the type that its line says, fits the declared model, and has the next number.
    """
    found = []
    for part in text.split("\n\n"):
        if not part or part.startswith((":", "event: error\n")):
            continue
        kind, _, data = part.partition("\ndata: ")
        content = orjson.loads(data)
        assert kind == f"event: {content['type']}"
        ResponseEvent.model_validate_json(data, strict=True)
        found.append(content)
    assert [event["sequence_number"] for event in found] == [*range(first, first + len(found))]
    return found


def check_stream(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Check that each event follows from those before it, and return the response that the last one has."""
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["status"] == "in_progress"
    assert (events[0]["response"]["output"], events[0]["response"]["usage"]) == ([], None)
    items: list[dict[str, Any]] = []
    grown = ""
    for event in events[2:-1]:
        kind, place = event["type"], event.get("output_index")
        if kind == "response.output_item.added":
            assert place == len(items)
            assert event["item"]["status"] == "in_progress"
            items.append(event["item"])
            grown = ""
            continue
        assert place == len(items) - 1
        item = items[place]
        assert event.get("item_id", item["id"]) == item["id"]
        if kind.endswith(".delta"):
            grown += event["delta"]
        elif kind == "response.output_item.done":
            assert {**item, **event["item"]} == event["item"]
            items[place] = event["item"]
        elif kind.endswith(("text.done", "arguments.done")):
            assert event.get("text", event.get("arguments")) == grown
        elif kind == "response.content_part.done":
            assert event["part"]["text"] == grown
            assert event["part"] != {}
        else:
            assert kind == "response.content_part.added"
            assert event["part"]["text"] == ""
    assert events[-1]["type"] in LAST
    response: dict[str, Any] = events[-1]["response"]
    assert response["output"] == items
    return response
