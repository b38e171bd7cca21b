"""Tool calls and reasoning in /v1/chat/completions, through the real app before an engine that sends given texts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from support.fake_engine import FakeEngine, events, with_engine

from pdserve.messages.conversation import ChatMessage, ChatToolCall
from pdserve.messages.outputs import FinishType, ReasoningReport, TextBatch
from pdserve.messages.sampling import OutputMarks
from pdserve.messages.text import EncodeReq
from pdserve.server.http.openai.answers import ChatAnswer, ChatChunk

CHAT = "/v1/chat/completions"
QWEN = 'tools <tool_call>{"name": .., "arguments": ..}</tool_call> <think></think>'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Weather now.", "parameters": SCHEMA}}
USER = {"role": "user", "content": "Weather in Rome?"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
NINE_TOKENS = ReasoningReport(False, 9)
OUTPUT = f"<think>\nRome, so a call.\n</think>\n\nLet me look.\n{CALL}\n{CALL.replace('Rome', 'Bari')}"


def ask(
    body: dict[str, Any],
    output: str = OUTPUT,
    *,
    piece: int = 7,
    finish: FinishType = FinishType.STOP,
    reasoning: ReasoningReport | None = NINE_TOKENS,
    template: str = QWEN,
    **options: Any,
) -> tuple[httpx.Response, FakeEngine]:
    """Answer a chat with ``output``, in pieces of some characters, each a token."""

    async def run(engine: FakeEngine) -> tuple[httpx.Response, FakeEngine]:
        asking = asyncio.create_task(engine.post(CHAT, {"messages": [USER], "max_tokens": 500, **body}))
        wanted = body.get("n", 1)
        while len(engine.requests) < wanted and not asking.done():
            await asyncio.sleep(0)
        for request in engine.requests:
            pieces = [output[i : i + piece] for i in range(0, len(output), piece)]
            for i, text in enumerate(pieces):
                item = engine.text(request, text, [i], finish if i + 1 == len(pieces) else None)
                item.reasoning = reasoning if i in (0, len(pieces) - 1) else None
                engine.client.dispatch([TextBatch([item])])
                await asyncio.sleep(0)
        return await asking, engine

    return with_engine(run, hold=True, template=template, **options)


def message_of(response: httpx.Response) -> dict[str, Any]:
    ChatAnswer.model_validate(response.json())
    return response.json()["choices"][0]["message"]


def fold(chunks: Sequence[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """Return the message that a stream's deltas add up to, as clients add them."""
    message: dict[str, Any] = {"content": None}
    for chunk in chunks:
        ChatChunk.model_validate(chunk)
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            for name, value in choice["delta"].items():
                if name != "tool_calls":
                    message[name] = (message.get(name) or "") + value
                    continue
                for call in value:
                    calls = message.setdefault("tool_calls", [])
                    if "id" in call:
                        assert call["index"] == len(calls)
                        calls.append({**call, "function": {**call["function"]}})
                        continue
                    assert call["index"] == len(calls) - 1
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    for call in message.get("tool_calls", ()):
        del call["index"]
    if message["content"] == "" and "tool_calls" in message:
        message["content"] = None
    return message


def arguments(message: dict[str, Any]) -> list[Any]:
    return [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]]


def test_reasoning_text_and_calls() -> None:
    response, engine = ask({"tools": [TOOL]})
    message = message_of(response)
    assert (message["reasoning_content"], message["content"]) == ("Rome, so a call.", "Let me look.")
    assert arguments(message) == [{"city": "Rome"}, {"city": "Bari"}]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather", "weather"]
    assert response.json()["choices"][0]["finish_reason"] == "tool_calls"
    assert response.json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 9}
    [sent] = engine.sent
    assert sent.chat is not None
    assert sent.chat.tools == [TOOL]
    assert isinstance(sent.sampling.marks, OutputMarks)
    assert "<tool_call>" in sent.sampling.marks.shown


@pytest.mark.parametrize("piece", [1, 3, 500])
def test_a_stream_adds_up_to_the_whole_answer(piece: int) -> None:
    whole = message_of(ask({"tools": [TOOL], "rid": "r"})[0])
    chunks = events(ask({"tools": [TOOL], "rid": "r", "stream": True}, piece=piece)[0])
    assert fold(chunks) == whole
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])


def pieces_of_arguments(chunks: Sequence[dict[str, Any]]) -> list[str]:
    """Return the arguments of each part of a call in a stream."""
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    return [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ())]


def test_arguments_are_streamed_while_the_model_writes_them() -> None:
    chunks = events(ask({"tools": [TOOL], "stream": True}, f"Hm. {CALL}", piece=3)[0])
    first, *others = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert (first["index"], first["type"], first["function"]["name"]) == (0, "function", "weather")
    assert all(call.keys() == {"index", "function"} and call["function"].keys() == {"arguments"} for call in others)
    pieces = pieces_of_arguments(chunks)
    assert "".join(pieces) == '{"city": "Rome"}'
    assert len(pieces) > 4
    # The brace that ends them is the call's end.
    assert pieces[-1].endswith("}")
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_calls_are_sent_whole_where_the_server_says_so() -> None:
    body = {"tools": [TOOL], "stream": True, "rid": "r"}
    chunks = events(ask(body, piece=3, stream_tool_arguments=False)[0])
    assert pieces_of_arguments(chunks) == ['{"city": "Rome"}', '{"city": "Bari"}']
    assert fold(chunks) == fold(events(ask(body, piece=3)[0]))


def test_a_stream_has_a_part_of_a_call_that_is_cut() -> None:
    body, output = {"tools": [TOOL], "stream": True}, OUTPUT[:-20]
    chunks = events(ask(body, output, finish=FinishType.LENGTH)[0])
    assert [call["function"]["arguments"] for call in fold(chunks)["tool_calls"]] == ['{"city": "Rome"}', '{"city": "']
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    whole = fold(events(ask(body, output, finish=FinishType.LENGTH, stream_tool_arguments=False)[0]))
    assert arguments(whole) == [{"city": "Rome"}]


def test_a_call_that_breaks_ends_with_text_and_is_none() -> None:
    output = '<tool_call>\n{"name": "weather", "arguments": {"city": Rome}}\n</tool_call>'
    chunks = events(ask({"tools": [TOOL], "stream": True}, output, piece=4)[0])
    message = fold(chunks)
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"city": ']
    assert message["content"] == "Rome}}\n</tool_call>"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert message_of(ask({"tools": [TOOL]}, output)[0]) == {"role": "assistant", "content": output}


def test_ids_of_calls_differ_and_are_the_same_at_every_instance() -> None:
    first, again = (message_of(ask({"tools": [TOOL], "rid": "r"})[0]) for _ in range(2))
    other = message_of(ask({"tools": [TOOL], "rid": "s"})[0])
    ids = [call["id"] for message in (first, other) for call in message["tool_calls"]]
    assert first == again
    assert len({*ids}) == 4
    assert all(name.startswith("call_") for name in ids)


def test_several_choices_keep_their_calls_apart() -> None:
    whole = ask({"tools": [TOOL], "n": 2, "rid": "r"})[0].json()["choices"]
    chunks = events(ask({"tools": [TOOL], "n": 2, "rid": "r", "stream": True})[0])
    assert [arguments(choice["message"]) for choice in whole] == [[{"city": "Rome"}, {"city": "Bari"}]] * 2
    assert [fold(chunks, i) for i in (0, 1)] == [choice["message"] for choice in whole]
    assert len({call["id"] for choice in whole for call in choice["message"]["tool_calls"]}) == 4


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_at_a_time(stream: bool) -> None:
    response, _ = ask({"tools": [TOOL], "parallel_tool_calls": False, "stream": stream})
    message = fold(events(response)) if stream else message_of(response)
    assert arguments(message) == [{"city": "Rome"}]


def test_a_call_that_breaks_is_not_the_only_one() -> None:
    """Else ``finish_reason`` would promise a complete call, and there would be none."""
    broken = '<tool_call>\n{"name": "weather", "arguments": {"city": Rome}}\n</tool_call>'
    chunks = events(ask({"tools": [TOOL], "parallel_tool_calls": False, "stream": True}, broken + OUTPUT)[0])
    written = [call["function"]["arguments"] for call in fold(chunks)["tool_calls"]]
    assert written == ['{"city": ', '{"city": "Rome"}']
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("finish", [FinishType.LENGTH, FinishType.TIMEOUT, FinishType.ABORT])
def test_a_call_that_is_cut_is_not_answered(finish: FinishType) -> None:
    response, _ = ask({"tools": [TOOL]}, OUTPUT[:-20], finish=finish)
    assert arguments(message_of(response)) == [{"city": "Rome"}]
    assert response.json()["choices"][0]["finish_reason"] == "length"


def test_without_tools_a_call_is_text_and_reasoning_is_apart() -> None:
    for body in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        response, engine = ask(body)
        message = message_of(response)
        assert message["content"].startswith("Let me look.\n<tool_call>")
        assert message["reasoning_content"] == "Rome, so a call."
        assert response.json()["choices"][0]["finish_reason"] == "stop"
        assert engine.sent[0].chat.tools is None


def test_reasoning_that_the_prompt_begins() -> None:
    output = OUTPUT.removeprefix("<think>\n")
    message = message_of(ask({"tools": [TOOL]}, output, reasoning=ReasoningReport(True, 8))[0])
    assert message["reasoning_content"] == "Rome, so a call."


def test_reasoning_in_the_text_or_left_out() -> None:
    together = message_of(ask({"separate_reasoning": False}, "<think>a</think>b")[0])
    assert together == {"role": "assistant", "content": "<think>a</think>b"}
    for extra in ({}, {"separate_reasoning": False}):
        message = message_of(ask({"include_reasoning": False, **extra}, "<think>a</think>b")[0])
        assert message == {"role": "assistant", "content": "b"}


def test_a_model_without_marks_answers_as_before() -> None:
    response, engine = ask({}, "<think>plain", template="{{ messages }}", reasoning=None)
    assert message_of(response) == {"role": "assistant", "content": "<think>plain"}
    assert engine.sent[0].sampling.marks is None
    assert "completion_tokens_details" not in response.json()["usage"]


@pytest.mark.parametrize(
    ("body", "template", "param", "says"),
    [
        ({"tool_choice": "required"}, QWEN, "tool_choice", "needs tools"),
        ({"tools": [TOOL]}, "{{ messages }}", "tools", "--chat-template"),
        ({"tools": [TOOL]}, "{{ tools }}", "tools", "--tool-call-parser"),
        ({"tools": [{"type": "function", "function": {}}]}, QWEN, "tools[0].function.name", ""),
        ({"tools": [{**TOOL, "type": "web_search"}]}, QWEN, "tools[0].type", ""),
        ({"messages": [{**USER, "tool_call_id": "x"}]}, QWEN, "messages[0].tool_call_id", "tool"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            QWEN,
            "messages[0].tool_calls[0]",
            "not JSON",
        ),
    ],
)
def test_what_can_not_be_served_is_refused(body: dict[str, Any], template: str, param: str, says: str) -> None:
    response, engine = ask(body, template=template)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert says in response.json()["error"]["message"]
    assert not engine.sent


@pytest.mark.parametrize("content", [None, "", "Let me see."])
def test_a_history_with_calls_reaches_the_template(content: str | None) -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}]
    answer = {"role": "tool", "tool_call_id": "c1", "content": "20 degrees"}
    _, engine = ask({"messages": [USER, {"role": "assistant", "content": content, "tool_calls": calls}, answer]})
    chat = engine.sent[0].chat
    assert chat is not None
    assert chat.messages[1:] == [
        ChatMessage("assistant", content, tool_calls=[ChatToolCall("c1", "weather", {"city": "Rome"})]),
        ChatMessage("tool", "20 degrees", tool_call_id="c1"),
    ]


def test_log_probabilities_and_token_ids_are_of_all_tokens() -> None:
    body = {"tools": [TOOL], "logprobs": True, "return_token_ids": True}
    choice = ask(body)[0].json()["choices"][0]
    chunks = events(ask({**body, "stream": True})[0])
    tokens = [token for chunk in chunks for token in (chunk["choices"][0]["logprobs"] or {"content": ()})["content"]]
    assert [token["token"] for token in tokens] == [token["token"] for token in choice["logprobs"]["content"]]
    assert len(tokens) == len(choice["token_ids"]) == -(-len(OUTPUT) // 7)


def test_tokenize_renders_tools() -> None:
    async def run(engine: FakeEngine) -> tuple[httpx.Response, FakeEngine]:
        return await engine.post("/tokenize", {"messages": [USER], "tools": [TOOL]}), engine

    response, engine = with_engine(run, template=QWEN)
    assert response.status_code == 200
    asked = [question for question in engine.questions if isinstance(question, EncodeReq)]
    assert [question.chat.tools for question in asked if question.chat is not None] == [[TOOL]]
    response, _ = with_engine(run, template="{{ messages }}")
    assert response.json()["error"]["param"] == "tools"


@pytest.mark.parametrize(
    "tools",
    [
        [{"type": "function", "function": {"name": "f", "parameters": {"x": "y" * (1 << 20)}}}],
        [{"type": "function", "function": {"name": "f", "description": "y" * 600_000}}] * 2,
        [{"type": "function", "function": {"name": "f", "parameters": {str(i): [] for i in range(40)}}}] * 1000,
        [TOOL] * 1025,
    ],
)
def test_large_tools_are_refused(tools: list[dict[str, Any]]) -> None:
    response, engine = ask({"tools": tools})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("tools")
    assert not engine.sent
