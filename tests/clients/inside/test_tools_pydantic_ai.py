"""pydantic-ai: agents with a tool and with an object as their answer, plain and streamed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.messages import ModelResponse, ToolCallPart, ToolReturnPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

QUESTION = "What is the weather in Paris?"
ANSWER = "It is sunny in Paris."


class Town(BaseModel):
    """A town."""

    name: str
    inhabitants: int


def get_weather(city: str) -> str:
    """Report the weather."""
    return f"sun over {city}"


@pytest.fixture(params=[OpenAIChatModel, OpenAIResponsesModel])
def served(request: pytest.FixtureRequest, url: str, model: str) -> Any:
    return request.param(model, provider=OpenAIProvider(base_url=url + "/v1", api_key="anything"))


def test_an_agent_answers_from_the_result(served: Any) -> None:
    whole = Agent(served, tools=[get_weather]).run_sync(QUESTION)
    assert whole.output == ANSWER
    parts = [part for message in whole.all_messages() for part in message.parts]
    [call] = [part for part in parts if isinstance(part, ToolCallPart)]
    assert call.args_as_dict() == {"city": "Paris"}
    [result] = [part for part in parts if isinstance(part, ToolReturnPart)]
    assert result.tool_call_id == call.tool_call_id
    assert whole.all_messages()[-1].finish_reason == "stop"


def test_a_streamed_agent_says_the_same(served: Any) -> None:
    async def run() -> tuple[str, list[Any]]:
        async with Agent(served, tools=[get_weather]).run_stream(QUESTION) as stream:
            said = [text async for text in stream.stream_text(delta=True, debounce_by=None)]
            return "".join(said), stream.all_messages()

    said, messages = asyncio.run(run())
    assert said == ANSWER
    assert sum(isinstance(message, ModelResponse) for message in messages) == 2


def test_an_object_is_the_answer(served: Any) -> None:
    agent = Agent(served, output_type=Town)
    assert agent.run_sync("Put Lyon into a final answer.").output == Town(name="Lyon", inhabitants=520000)
