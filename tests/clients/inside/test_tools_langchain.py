"""langchain: an agent that calls a tool, and the loop by hand."""

from __future__ import annotations

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

QUESTION = "What is the weather in Paris?"
ANSWER = "It is sunny in Paris."


@tool
def get_weather(city: str) -> str:
    """Report the weather."""
    return f"sun over {city}"


def chat(url: str, model: str, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(base_url=url + "/v1", api_key="anything", model=model, temperature=0, max_retries=0, **options)


@pytest.mark.parametrize("responses", [False, True])
def test_an_agent_answers_from_the_result(url: str, model: str, responses: bool) -> None:
    agent = create_agent(chat(url, model, use_responses_api=responses), [get_weather])
    asked: Any = {"messages": [HumanMessage(QUESTION)]}
    whole = agent.invoke(asked)["messages"]
    assert [message.type for message in whole] == ["human", "ai", "tool", "ai"]
    assert whole[-1].text == ANSWER
    streamed = [message for message, _ in agent.stream(asked, stream_mode="messages")]
    assert [message.content for message in streamed if isinstance(message, ToolMessage)] == ["sun over Paris"]
    assert "".join(message.text for message in streamed if isinstance(message, AIMessageChunk)) == ANSWER


def test_a_streamed_loop_by_hand(url: str, model: str) -> None:
    llm = chat(url, model, stream_usage=True).bind_tools([get_weather])
    messages: list[Any] = [HumanMessage("What is the weather in Paris and Oslo?")]
    first, *others = llm.stream(messages)
    for chunk in others:
        first += chunk
    assert [call["args"] for call in first.tool_calls] == [{"city": "Paris"}, {"city": "Oslo"}]
    assert not first.invalid_tool_calls
    weather = {"Paris": "sun over Paris", "Oslo": "rain over Oslo"}
    results = [ToolMessage(weather[call["args"]["city"]], tool_call_id=call["id"]) for call in first.tool_calls]
    last = llm.invoke([*messages, AIMessage(first.content, tool_calls=first.tool_calls), *results])
    assert last.text == "It is sunny in Paris and wet in Oslo."
