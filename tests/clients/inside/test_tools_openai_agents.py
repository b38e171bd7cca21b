"""openai-agents: an agent with a tool, plain and streamed, by both of OpenAI's APIs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)
QUESTION = "What is the weather in Paris?"
ANSWER = "It is sunny in Paris."


@function_tool
def get_weather(city: str) -> str:
    """Report the weather."""
    return f"sun over {city}"


@pytest.fixture(params=[OpenAIChatCompletionsModel, OpenAIResponsesModel])
def make_agent(request: pytest.FixtureRequest, url: str, model: str) -> Any:
    def make() -> Agent[Any]:
        client = AsyncOpenAI(base_url=url + "/v1", api_key="anything", max_retries=0, timeout=120)
        served = request.param(model=model, openai_client=client)
        return Agent(name="Reporter", instructions="Report on the sky.", tools=[get_weather], model=served)

    return make


def kinds(items: list[Any]) -> list[str]:
    return [item.type for item in items]


ITEMS = ["tool_call_item", "tool_call_output_item", "message_output_item"]


def test_an_agent_answers_from_the_result(make_agent: Any) -> None:
    result = asyncio.run(Runner.run(make_agent(), QUESTION))
    assert result.final_output == ANSWER
    assert kinds(result.new_items) == ITEMS


def test_a_streamed_agent_says_the_same(make_agent: Any) -> None:
    async def run() -> tuple[str, Any]:
        result = Runner.run_streamed(make_agent(), QUESTION)
        said = ""
        async for event in result.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                said += event.data.delta
        return said, result

    said, result = asyncio.run(run())
    assert said == result.final_output == ANSWER
    assert kinds(result.new_items) == ITEMS
