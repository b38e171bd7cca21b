"""The openai package: tool calls and answers from their results, by hand and by its own helpers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessage
from pydantic import BaseModel

RESULTS = {"Paris": "sun over Paris", "Oslo": "rain over Oslo"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "Report the weather.", "parameters": SCHEMA}
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]
QUESTIONS = {
    "What is the weather in Paris?": ["Paris"],
    "Think of Paris, and tell its weather.": ["Paris"],
    "What is the weather in Paris and Oslo?": ["Paris", "Oslo"],
}


class Town(BaseModel):
    """A town."""

    name: str
    inhabitants: int


@pytest.fixture
def client(url: str) -> OpenAI:
    return OpenAI(base_url=url + "/v1", api_key="anything", max_retries=0, timeout=120)


def added_up(chunks: Iterable[ChatCompletionChunk]) -> dict[str, Any]:
    """Return the assistant's message of a stream, as clients add it up: calls by index, arguments joined."""
    text, calls = "", {}
    for chunk in chunks:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for part in choice.delta.tool_calls or ():
                call = calls.setdefault(part.index, {"id": "", "type": "function", "name": "", "arguments": ""})
                call["id"] += part.id or ""
                call["name"] += part.function.name or ""
                call["arguments"] += part.function.arguments or ""
    made = [
        {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
        for _, call in sorted(calls.items())
    ]
    return {"role": "assistant", "content": text or None, **({"tool_calls": made} if made else {})}


def ask(client: OpenAI, model: str, messages: list[Any], *, stream: bool) -> dict[str, Any]:
    """Return the assistant's next message."""
    body: dict[str, Any] = {"model": model, "messages": messages, "tools": TOOLS, "temperature": 0}
    if stream:
        return added_up(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    message: ChatCompletionMessage = client.chat.completions.create(**body).choices[0].message
    return message.model_dump(exclude_none=True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("question", QUESTIONS)
def test_a_loop_by_hand(client: OpenAI, model: str, question: str, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": question}]
    first = ask(client, model, messages, stream=stream)
    calls = first["tool_calls"]
    cities = [json.loads(call["function"]["arguments"])["city"] for call in calls]
    assert cities == QUESTIONS[question]
    assert len({call["id"] for call in calls}) == len(calls)
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": RESULTS[city]}
        for call, city in zip(calls, cities, strict=True)
    ]
    last = ask(client, model, [*messages, first, *results], stream=stream)
    assert last["content"] == "It is sunny in Paris" + (" and wet in Oslo." if len(calls) == 2 else ".")
    assert "tool_calls" not in last


def test_the_stream_helper_finds_the_call(client: OpenAI, model: str) -> None:
    tool = openai.pydantic_function_tool(Town)
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "Name a town of France."}]}
    with client.chat.completions.stream(**body, tools=[tool]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    assert "tool_calls.function.arguments.done" in kinds
    [call] = final.choices[0].message.tool_calls
    assert call.function.parsed_arguments == Town(name="lyon", inhabitants=520000)
    [same] = client.chat.completions.parse(**body, tools=[tool]).choices[0].message.tool_calls
    assert same.function.parsed_arguments == call.function.parsed_arguments


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_of_responses(client: OpenAI, model: str, stream: bool) -> None:
    tools: list[Any] = [{"type": "function", "strict": False, **FUNCTION}]

    def respond(**fields: Any) -> Any:
        if not stream:
            return client.responses.create(model=model, tools=tools, **fields)
        with client.responses.stream(model=model, tools=tools, **fields) as events:
            return events.get_final_response()

    first = respond(input="What is the weather in Paris?")
    [call] = first.output
    assert json.loads(call.arguments) == {"city": "Paris"}
    output = {"type": "function_call_output", "call_id": call.call_id, "output": RESULTS["Paris"]}
    assert respond(input=[output], previous_response_id=first.id).output_text == "It is sunny in Paris."
