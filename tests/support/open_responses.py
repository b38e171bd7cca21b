"""The requests of Open Responses' compliance tests in our own words, and checks of what that specification requires.

Each check returns its faults as sentences; none means that it passes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import httpx

Json = dict[str, Any]
Faults = list[str]
Post = Callable[[Json], httpx.Response]
"""Sends a body to ``/v1/responses``."""
Types = tuple[type, ...]
NULL = type(None)
TEXT: Types = (str,)
NUMBER: Types = (int, float)
INTEGER: Types = (int,)
FLAG: Types = (bool,)
LIST: Types = (list,)
OBJECT: Types = (dict,)

RESPONSE: Mapping[str, Types] = {
    **dict.fromkeys(("id", "object", "status", "model", "truncation", "service_tier"), TEXT),
    **dict.fromkeys(("created_at", "top_logprobs"), INTEGER),
    **dict.fromkeys(("top_p", "presence_penalty", "frequency_penalty", "temperature"), NUMBER),
    **dict.fromkeys(("parallel_tool_calls", "store", "background"), FLAG),
    **dict.fromkeys(("output", "tools"), LIST),
    **dict.fromkeys(("text", "metadata"), OBJECT),
    **dict.fromkeys(("completed_at", "max_output_tokens", "max_tool_calls"), (int, NULL)),
    **dict.fromkeys(
        ("previous_response_id", "instructions", "user", "safety_identifier", "prompt_cache_key"), (str, NULL)
    ),
    **dict.fromkeys(("incomplete_details", "error", "reasoning", "usage"), (dict, NULL)),
    "tool_choice": (str, dict),
}
"""Fields that every response has, with their types."""
USAGE: Mapping[str, Types] = {
    **dict.fromkeys(("input_tokens", "output_tokens", "total_tokens"), INTEGER),
    **dict.fromkeys(("input_tokens_details", "output_tokens_details"), OBJECT),
}
TOOL: Mapping[str, Types] = {
    **dict.fromkeys(("type", "name"), TEXT),
    "description": (str, NULL),
    "parameters": (dict, NULL),
    "strict": (bool, NULL),
}
ITEMS: Mapping[str, Mapping[str, Types]] = {
    "message": {**dict.fromkeys(("type", "id", "status", "role"), TEXT), "content": LIST},
    "function_call": dict.fromkeys(("type", "id", "call_id", "name", "arguments", "status"), TEXT),
    "reasoning": {**dict.fromkeys(("type", "id"), TEXT), "summary": LIST},
}
"""Required fields of items, by type."""
OPTIONAL: Mapping[str, Types] = {"encrypted_content": TEXT, "content": LIST}
"""Types of fields that an item may leave out. None of them may be null."""
PARTS: Mapping[str, Mapping[str, Types]] = {
    "output_text": {**dict.fromkeys(("type", "text"), TEXT), **dict.fromkeys(("annotations", "logprobs"), LIST)},
    "reasoning_text": dict.fromkeys(("type", "text"), TEXT),
}
"""Required fields of content parts, by type."""
NUMBERED: Mapping[str, Types] = {"type": TEXT, "sequence_number": INTEGER}
OF_ITEM: Mapping[str, Types] = {**NUMBERED, "output_index": INTEGER, "item": OBJECT}
IN_ITEM: Mapping[str, Types] = {**NUMBERED, "output_index": INTEGER, "item_id": TEXT}
IN_PART: Mapping[str, Types] = {**IN_ITEM, "content_index": INTEGER}
EVENTS: Mapping[str, Mapping[str, Types]] = {
    **{
        f"response.{name}": {**NUMBERED, "response": OBJECT}
        for name in ("created", "in_progress", "completed", "incomplete", "failed")
    },
    **{f"response.output_item.{step}": OF_ITEM for step in ("added", "done")},
    **{f"response.content_part.{step}": {**IN_PART, "part": OBJECT} for step in ("added", "done")},
    "response.output_text.delta": {**IN_PART, "delta": TEXT, "logprobs": LIST},
    "response.output_text.done": {**IN_PART, "text": TEXT, "logprobs": LIST},
    "response.reasoning_text.delta": {**IN_PART, "delta": TEXT},
    "response.reasoning_text.done": {**IN_PART, "text": TEXT},
    "response.function_call_arguments.delta": {**IN_ITEM, "delta": TEXT},
    "response.function_call_arguments.done": {**IN_ITEM, "arguments": TEXT},
}
"""Required fields of events, by type."""
LAST = ("response.completed", "response.incomplete", "response.failed")
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def message(role: str, content: Any) -> Json:
    """Return an item of the input."""
    return {"type": "message", "role": role, "content": content}


WEATHER: Json = {
    "input": [message("user", "What is the weather in Paris right now?")],
    "tools": [
        {
            "type": "function",
            "name": "get_weather",
            "description": "Tell the weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        }
    ],
}
IMAGE = [
    {"type": "input_text", "text": "What is in the picture?"},
    {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"},
]


def fields_missing(place: str, content: Any, wanted: Mapping[str, Types]) -> Faults:
    """Return the fields of an object that are missing or of another type."""
    if not isinstance(content, dict):
        return [f"{place} is no object"]
    absent = [f"{place}.{name} is missing" for name in wanted if name not in content]
    wrong = [
        f"{place}.{name} is {content[name]!r}"
        for name, types in wanted.items()
        # True is an int to Python.
        if name in content and (type(content[name]) not in types)
    ]
    return absent + wrong


def item_faults(place: str, item: Any) -> Faults:
    """Check an item of the output, with its content."""
    kind = item.get("type") if isinstance(item, dict) else None
    if kind not in ITEMS:
        return [f"{place} has the type {kind!r}"]
    present = {name: types for name, types in OPTIONAL.items() if name in item}
    faults = fields_missing(place, item, {**ITEMS[kind], **present})
    for i, part in enumerate(item.get("content") or ()):
        faults += part_faults(f"{place}.content[{i}]", part)
    return faults


def part_faults(place: str, part: Any) -> Faults:
    """Check a content part."""
    kind = part.get("type") if isinstance(part, dict) else None
    return fields_missing(place, part, PARTS[kind]) if kind in PARTS else [f"{place} has the type {kind!r}"]


def response_faults(response: Any, place: str = "response") -> Faults:
    """Check a response with its items, tools and usage."""
    faults = fields_missing(place, response, RESPONSE)
    if faults:
        return faults
    if response["object"] != "response":
        faults.append(f"{place}.object is {response['object']!r}")
    for i, item in enumerate(response["output"]):
        faults += item_faults(f"{place}.output[{i}]", item)
    for i, tool in enumerate(response["tools"]):
        faults += fields_missing(f"{place}.tools[{i}]", tool, TOOL)
    if (usage := response["usage"]) is not None:
        faults += fields_missing(f"{place}.usage", usage, USAGE)
        faults += fields_missing("input_tokens_details", usage["input_tokens_details"], {"cached_tokens": INTEGER})
        faults += fields_missing("output_tokens_details", usage["output_tokens_details"], {"reasoning_tokens": INTEGER})
    return faults


def event_faults(event: Json) -> Faults:
    """Check an event of a stream, with the response, item or part in it."""
    kind = event.get("type")
    if kind not in EVENTS:
        return [f"there is an event {kind!r}"]
    faults = fields_missing(kind, event, EVENTS[kind])
    if "response" in event:
        faults += response_faults(event["response"], f"{kind}.response")
    if "item" in event:
        faults += item_faults(f"{kind}.item", event["item"])
    if "part" in event:
        faults += part_faults(f"{kind}.part", event["part"])
    return faults


class Answered(NamedTuple):
    """A response, the faults of its form, and the types of its events."""

    response: Json
    faults: Faults
    events: list[Json]

    def has_completed(self) -> Faults:
        """Return a fault unless there is output, and the status is "completed"."""
        if self.faults:
            return self.faults
        status = self.response["status"]
        empty = [] if self.response["output"] else ["there is no output"]
        return empty + ([] if status == "completed" else [f"the status is {status!r}"])

    def has_call(self) -> Faults:
        """Return a fault unless a function is called."""
        kinds = [item["type"] for item in self.response.get("output", ())]
        return self.faults or ([] if "function_call" in kinds else [f"no function is called: {kinds}"])


def plain(post: Post, body: Json) -> Answered:
    """Ask for a whole response."""
    answer = post({**body, "stream": False})
    if answer.status_code != 200:
        return Answered({}, [f"the status is {answer.status_code}: {answer.text}"], [])
    return Answered(answer.json(), response_faults(answer.json()), [])


def streamed(post: Post, body: Json) -> Answered:
    """Ask for a stream. The response is that of its last event."""
    answer = post({**body, "stream": True})
    if answer.status_code != 200:
        return Answered({}, [f"the status is {answer.status_code}: {answer.text}"], [])
    events, faults = [], []
    for part in answer.text.split("\n\n"):
        name, _, data = part.partition("\ndata: ")
        if not data or data == "[DONE]":
            continue
        events.append(json.loads(data))
        faults += event_faults(events[-1])
        if name != f"event: {events[-1].get('type')}":
            faults.append(f"an event {events[-1].get('type')!r} is named {name!r}")
    numbers = [event.get("sequence_number") for event in events]
    if numbers != sorted(set(numbers)):
        faults.append(f"the events are numbered {numbers}")
    last = events[-1] if events and events[-1].get("type") in LAST else {}
    return Answered(last.get("response", {}), faults or ([] if last else ["no last event came"]), events)


def basic(post: Post) -> Faults:
    """Ask with one message of a user."""
    return plain(post, {"input": [message("user", "Name a colour.")]}).has_completed()


def stream(post: Post) -> Faults:
    """Ask for a stream."""
    return streamed(post, {"input": [message("user", "Name a colour.")]}).has_completed()


def system_prompt(post: Post) -> Faults:
    """Ask with a message of the system before the user's."""
    turns = [message("system", "Be brief."), message("user", "Name a colour.")]
    return plain(post, {"input": turns}).has_completed()


def tool_call(post: Post) -> Faults:
    """Ask what only a function can answer."""
    return plain(post, WEATHER).has_call()


def streamed_tool_call(post: Post) -> Faults:
    """Ask what only a function can answer, for a stream, which tells the call step by step."""
    answered = streamed(post, WEATHER)
    kinds = {event["type"] for event in answered.events}
    calls = {event["type"] for event in answered.events if event.get("item", {}).get("type") == "function_call"}
    wanted = {f"response.function_call_arguments.{step}" for step in ("delta", "done")}
    steps = {f"response.output_item.{step}" for step in ("added", "done")}
    return answered.has_call() or [f"{kind} is missing" for kind in sorted((wanted - kinds) | (steps - calls))]


def conversation(post: Post) -> Faults:
    """Ask within a conversation."""
    turns = [message("user", "I am Ana."), message("assistant", "Hello Ana."), message("user", "Name a colour.")]
    return plain(post, {"input": turns}).has_completed()


def image(post: Post) -> Faults:
    """Ask about a picture, which this server refuses by name."""
    answer = post({"input": [message("user", IMAGE)]})
    if answer.status_code != 400:
        return [f"the status is {answer.status_code}"]
    error = answer.json()["error"]
    where = "input[0].content[1].type"
    is_named = error["param"] == where and "input_image" in error["message"]
    return [] if is_named else [f"the error is {error}"]


CHECKS: Mapping[str, Callable[[Post], Faults]] = {
    "basic-response": basic,
    "streaming-response": stream,
    "system-prompt": system_prompt,
    "tool-calling": tool_call,
    "tool-calling-streaming": streamed_tool_call,
    "multi-turn": conversation,
    "image-input": image,
}
"""Checks by the names that the compliance tests have for them. The last one passes if the image is refused by name."""
