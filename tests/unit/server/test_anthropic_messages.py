"""/v1/messages and /v1/messages/count_tokens, through the real app before an engine that sends given texts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from support.fake_engine import CACHED_TOKENS, PROMPT_TOKENS, FakeEngine, with_engine

from pdserve.messages.moves import ReqArrived, ReqMoved
from pdserve.messages.outputs import FinishReason, FinishType, ReasoningReport, ReqError, ReqMeta, TextBatch, Timing
from pdserve.messages.text import EncodeReq
from pdserve.runtime.web.moved_answer import TICKET
from pdserve.server.http.anthropic import messages
from pdserve.server.http.anthropic.answers import AnthropicErrorAnswer, MessageAnswer, MessageEvent
from pdserve.server.http.anthropic.content import ContentBlocks, fold
from pdserve.server.output_parsers.events import ReasoningDelta, TextDelta, ToolCall
from tests.unit.server.test_http_moved import FOLLOWS, KEY, Two

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
QWEN = 'tools <tool_call>{"name": .., "arguments": ..}</tool_call> <think></think>'
USER = {"role": "user", "content": "Weather in Rome?"}
TOOL = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
OUTPUT = f"<think>\nRome, so a call.\n</think>\n\nLet me look.\n{CALL}\n{CALL.replace('Rome', 'Bari')}"
END_OF_TURN = FinishReason(FinishType.STOP, 2)
USAGE = {
    "input_tokens": PROMPT_TOKENS - CACHED_TOKENS,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": CACHED_TOKENS,
}


def ask(
    body: dict[str, Any],
    output: str = OUTPUT,
    *,
    piece: int = 7,
    finish: FinishReason = END_OF_TURN,
    template: str = QWEN,
    **options: Any,
) -> tuple[httpx.Response, FakeEngine]:
    """Answer a conversation with ``output``, in pieces of some characters, each a token."""

    async def run(engine: FakeEngine) -> tuple[httpx.Response, FakeEngine]:
        whole = {"messages": [USER], "max_tokens": 500, "rid": "r", **body}
        asking = asyncio.create_task(engine.post(MESSAGES, whole))
        while not engine.requests and not asking.done():
            await asyncio.sleep(0)
        for request in engine.requests:
            pieces = [output[i : i + piece] for i in range(0, len(output), piece)]
            for i, text in enumerate(pieces):
                is_last = i + 1 == len(pieces)
                item = engine.text(request, text, [i], finish.type if is_last else None)
                item.finish = finish if is_last else None
                # As the detokenizer does it: the first text of an answer has the counts of the prompt.
                item.meta = item.meta or (ReqMeta(PROMPT_TOKENS, 0, CACHED_TOKENS, Timing()) if i == 0 else None)
                item.reasoning = ReasoningReport(False, 5) if i in (0, len(pieces) - 1) else None
                engine.client.dispatch([TextBatch([item])])
                await asyncio.sleep(0)
        return await asking, engine

    return with_engine(run, hold=True, template=template, **options)


def message_of(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    MessageAnswer.model_validate_json(response.content, strict=True)
    return response.json()


def events_of(text: str) -> list[dict[str, Any]]:
    """Return the JSON of a stream's events. Each has the name of its type."""
    events = []
    for event in text.split("\n\n")[:-1]:
        if event.startswith(":"):
            continue
        name, _, data = event.partition("\n")
        MessageEvent.model_validate_json(data.removeprefix("data: "), strict=True)
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert text.endswith("\n\n")
    return events


def add_up(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a stream's events add up to, as clients add them."""
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    message = dict(events[0]["message"])
    assert (message["content"], message["stop_reason"]) == ([], None)
    is_open = False
    for event in events[2:-2]:
        index, content = event["index"], message["content"]
        if event["type"] == "content_block_start":
            assert (is_open, index) == (False, len(content))
            content.append(dict(event["content_block"]))
            is_open = True
            continue
        assert (is_open, index) == (True, len(content) - 1)
        if event["type"] == "content_block_stop":
            is_open = False
            if "partial" in content[-1]:
                content[-1]["input"] = json.loads(content[-1].pop("partial"))
            continue
        name, more = next((key, value) for key, value in event["delta"].items() if key != "type")
        name = {"partial_json": "partial"}.get(name, name)
        content[-1][name] = content[-1].get(name, "") + more
    assert not is_open
    return message | events[-2]["delta"] | {"usage": message["usage"] | events[-2]["usage"]}


def streamed(body: dict[str, Any], output: str = OUTPUT, **how: Any) -> dict[str, Any]:
    response, _ = ask({**body, "stream": True}, output, **how)
    assert response.headers["content-type"].startswith("text/event-stream")
    return add_up(events_of(response.text))


def pieces_of_input(response: httpx.Response) -> list[str]:
    deltas = [event["delta"] for event in events_of(response.text) if event["type"] == "content_block_delta"]
    return [delta["partial_json"] for delta in deltas if delta["type"] == "input_json_delta"]


def test_inputs_of_calls_are_streamed_while_the_model_writes_them() -> None:
    body = {"tools": [TOOL], "stream": True}
    pieces = pieces_of_input(ask(body, CALL, piece=3)[0])
    assert "".join(pieces) == '{"city": "Rome"}'
    assert len(pieces) > 4
    whole = pieces_of_input(ask(body, CALL, piece=3, stream_tool_arguments=False)[0])
    assert whole == ['{"city": "Rome"}']


def test_a_stream_has_the_beginning_of_a_call_that_is_cut() -> None:
    response, _ = ask({"tools": [TOOL], "stream": True}, CALL[:-20], finish=FinishReason(FinishType.LENGTH))
    assert pieces_of_input(response)[-1] != "}"
    *_, stop, ending, _ = events_of(response.text)
    assert (stop["type"], ending["delta"]["stop_reason"]) == ("content_block_stop", "max_tokens")


def test_thinking_text_and_calls_are_blocks() -> None:
    response, engine = ask({"tools": [TOOL]})
    message = message_of(response)
    thinking, text, *calls = message["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "Rome, so a call.")
    assert thinking["signature"]
    assert text == {"type": "text", "text": "Let me look."}
    assert [(call["name"], call["input"]) for call in calls] == [("weather", {"city": c}) for c in ("Rome", "Bari")]
    assert len({call["id"] for call in calls}) == 2
    assert all(call["id"].startswith("toolu_") for call in calls)
    assert (message["id"], message["stop_reason"], message["stop_sequence"]) == ("r", "tool_use", None)
    output_tokens = -(-len(OUTPUT) // 7)
    assert message["usage"] == USAGE | {
        "output_tokens": output_tokens,
        "output_tokens_details": {"thinking_tokens": 5},
    }
    assert engine.sent[0].chat is not None
    assert [tool["function"]["name"] for tool in engine.sent[0].chat.tools or ()] == ["weather"]


@pytest.mark.parametrize("piece", [1, 3, 500])
@pytest.mark.parametrize("output", [OUTPUT, f"{CALL}\nand", "<think>so", "Rome.", CALL])
def test_a_stream_adds_up_to_the_whole_answer(output: str, piece: int) -> None:
    whole = message_of(ask({"tools": [TOOL]}, output, piece=piece)[0])
    assert streamed({"tools": [TOOL]}, output, piece=piece) == whole


def test_a_stream_begins_with_the_prompts_counts_and_ends_with_all() -> None:
    events = events_of(ask({"tools": [TOOL], "stream": True}, piece=7)[0].text)
    begun = events[0]["message"]["usage"]
    assert {name: begun[name] for name in USAGE} == USAGE
    assert events[-2]["usage"]["output_tokens"] == -(-len(OUTPUT) // 7)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("finish", "ends"),
    [
        (FinishReason(FinishType.STOP, 2), {"stop_reason": "end_turn", "stop_sequence": None}),
        (FinishReason(FinishType.STOP), {"stop_reason": "end_turn", "stop_sequence": None}),
        (FinishReason(FinishType.STOP, "END"), {"stop_reason": "stop_sequence", "stop_sequence": "END"}),
        (FinishReason(FinishType.LENGTH), {"stop_reason": "max_tokens", "stop_sequence": None}),
        *(
            (
                FinishReason(kind, message="why"),
                {
                    "stop_reason": "max_tokens",
                    "stop_sequence": None,
                    "pdserve_finish": {"type": kind.value, "message": "why"},
                },
            )
            for kind in (FinishType.ABORT, FinishType.TIMEOUT, FinishType.DECLINED)
        ),
    ],
)
def test_how_an_answer_ended(finish: FinishReason, ends: dict[str, Any], stream: bool) -> None:
    body = {"stop_sequences": ["END"]}
    message = streamed(body, "Rome.", finish=finish) if stream else message_of(ask(body, "Rome.", finish=finish)[0])
    assert {name: message.get(name) for name in ends} == ends
    assert ("pdserve_finish" in message) == ("pdserve_finish" in ends)


def test_a_long_call_shows_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "PROGRESS_SECONDS", 0.0)
    pings = [
        event
        for event in events_of(ask({"tools": [TOOL], "stream": True}, CALL, piece=9)[0].text)
        if event["type"] == "ping"
    ]
    assert pings[0] == {"type": "ping"}
    counts = [ping["output_tokens"] for ping in pings[1:]]
    assert len(counts) > 3
    assert counts == sorted(counts)


def test_a_cut_call_is_left_out_and_a_stop_sequence_comes_before_calls() -> None:
    cut = message_of(ask({"tools": [TOOL]}, OUTPUT[:-20], finish=FinishReason(FinishType.LENGTH))[0])
    assert ([block["type"] for block in cut["content"]], cut["stop_reason"]) == (
        ["thinking", "text", "tool_use"],
        "max_tokens",
    )
    stopped = message_of(ask({"tools": [TOOL]}, f"{CALL} and", finish=FinishReason(FinishType.STOP, "x"))[0])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "x")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("thinking", "blocks"),
    [
        (None, [("thinking", "so")]),
        ({"type": "enabled", "budget_tokens": 1024}, [("thinking", "so")]),
        ({"type": "adaptive", "display": "updates"}, [("thinking", "so")]),
        ({"type": "adaptive", "display": "omitted"}, [("thinking", "")]),
        ({"type": "disabled"}, []),
    ],
)
def test_thinking_is_shown_as_asked(thinking: Any, blocks: list[tuple[str, str]], stream: bool) -> None:
    body, output = {"thinking": thinking}, "<think>\nso\n</think>\n\nRome."
    content = (streamed(body, output) if stream else message_of(ask(body, output)[0]))["content"]
    assert [(block["type"], block.get("thinking", block.get("text"))) for block in content] == [
        *blocks,
        ("text", "Rome."),
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_at_a_time(stream: bool) -> None:
    body = {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    message = streamed(body) if stream else message_of(ask(body)[0])
    assert [block["input"] for block in message["content"] if block["type"] == "tool_use"] == [{"city": "Rome"}]
    assert message["stop_reason"] == "tool_use"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_forced_call_has_a_grammar(choice: dict[str, Any]) -> None:
    _, engine = ask({"tools": [TOOL], "tool_choice": choice}, CALL)
    grammar = engine.sent[0].sampling.grammar
    assert grammar is not None
    assert grammar.field == "tool_choice"


def test_arguments_are_answered_as_the_model_wrote_them() -> None:
    number = "123456789012345678901234567890"
    output = CALL.replace('"Rome"', f'{number}, "x": 1.0')
    answer = ask({"tools": [TOOL]}, output)[0].text
    assert f'"input":{{"city": {number}, "x": 1.0}}' in answer


def test_nothing_but_the_prompt_is_computed() -> None:
    message = message_of(ask({"max_tokens": 0}, "Rome.", finish=FinishReason(FinishType.LENGTH))[0])
    assert (message["content"], message["stop_reason"], message["usage"]["output_tokens"]) == ([], "max_tokens", 0)
    assert streamed({"max_tokens": 0}, "Rome.", finish=FinishReason(FinishType.LENGTH))["content"] == []


def test_sampling_reaches_the_engine() -> None:
    body = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "stop_sequences": ["END"], "max_tokens": 12}
    _, engine = ask({**body, "metadata": {"user_id": "ann"}}, "Rome.")
    [sent] = engine.sent
    sampling = sent.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 3, 0.9)
    assert (sampling.stop, sampling.max_new_tokens, sent.user) == (("END",), 12, "ann")


def test_what_is_ignored_is_named() -> None:
    body = {
        "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}, {**TOOL, "strict": True}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "service_tier": "auto",
        "cache_control": {"type": "ephemeral"},
        "anthropic_version": "bedrock-2023-05-31",
    }
    named = ask(body)[0].headers["x-pdserve-ignored"]
    assert named == "tools[0].type, tools[1].strict, thinking.budget_tokens, context_management, service_tier"


@pytest.mark.parametrize(
    ("body", "status", "kind", "param"),
    [
        ({"max_tokens": "x"}, 400, "invalid_request_error", "max_tokens"),
        ({"model": "claude-9"}, 404, "not_found_error", "model"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}, 400, "invalid_request_error", "tool_choice"),
    ],
)
def test_errors_have_anthropics_shape(body: dict[str, Any], status: int, kind: str, param: str) -> None:
    response, engine = ask(body)
    AnthropicErrorAnswer.model_validate_json(response.content, strict=True)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"], error["status"]) == (status, kind, param, status)
    assert not engine.sent


def test_a_thread_is_refused_as_anthropics_package_expects_it() -> None:
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        response, engine = ask({"thread": thread})
        AnthropicErrorAnswer.model_validate_json(response.content, strict=True)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "thread")
        assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        assert not engine.sent


def test_tools_need_a_template_with_tools() -> None:
    response, _ = ask({"tools": [TOOL]}, template="{{ messages }}")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


def test_errors_before_an_endpoint_have_its_shape() -> None:
    async def run(engine: FakeEngine) -> None:
        async with engine.http(**{"x-api-key": "wrong"}) as client:
            for path in (MESSAGES, COUNT):
                answer = await client.post(path, json={"messages": [USER], "max_tokens": 1})
                AnthropicErrorAnswer.model_validate_json(answer.content, strict=True)
                assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
        async with engine.http(**{"x-api-key": "secret", "anthropic-version": "2023-06-01"}) as client:
            answer = await client.post(f"{MESSAGES}/?beta=true", json={"messages": [USER], "max_tokens": 1})
            assert answer.status_code == 200
            answer = await client.get(MESSAGES)
            assert (answer.status_code, answer.json()["type"]) == (405, "error")

    with_engine(run, api_key="secret")


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ReqError("", 400, "too many", field="text", code="context_length_exceeded"), "invalid_request_error", None),
        (ReqError("", 429, "wait", "overloaded_error"), "rate_limit_error", "wait"),
        (ReqError("", 503, "full", "overloaded_error"), "overloaded_error", "full"),
        (ReqError("", 409, "other prompt", "transfer_error"), "invalid_request_error", "other prompt"),
        (ReqError("", 500, "broke"), "api_error", "broke"),
    ],
)
def test_errors_of_the_engine_have_anthropics_types(error: ReqError, kind: str, message: str | None) -> None:
    async def run(engine: FakeEngine) -> None:
        engine.errors = [error]
        said = (await engine.post(MESSAGES, {"messages": [USER], "max_tokens": 1})).json()["error"]
        assert said["type"] == kind
        assert said["message"] == (message or "prompt is too long: messages: too many")
        assert said["kind"] == ("server_error" if error.status == 500 else error.kind)

    with_engine(run)


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
@pytest.mark.parametrize(
    ("field", "code", "message"),
    [
        ("messages", "context_length_exceeded", "prompt is too long: messages has 9 tokens"),
        ("continue_final_message", None, "messages: has 9 tokens"),
    ],
)
def test_errors_of_the_prompt_have_this_apis_words(path: str, field: str, code: str | None, message: str) -> None:
    async def run(engine: FakeEngine) -> None:
        words = "messages has 9 tokens" if field == "messages" else "has 9 tokens"
        engine.errors = [ReqError("", 400, words, field=field, code=code)]
        answer = await engine.post(path, {"messages": [USER], "max_tokens": 1})
        error = AnthropicErrorAnswer.model_validate_json(answer.content, strict=True).error
        assert (answer.status_code, error.param, error.code, error.message) == (400, "messages", code, message)

    with_engine(run)


def test_answers_have_the_requests_id_where_anthropics_package_looks_for_it() -> None:
    async def run(engine: FakeEngine) -> None:
        body = {"messages": [USER], "max_tokens": 1}
        asked = [(MESSAGES, body), (MESSAGES, {**body, "stream": True}), (MESSAGES, {}), (COUNT, {"messages": [USER]})]
        answers = [await engine.post(path, content) for path, content in asked]
        assert [answer.status_code for answer in answers] == [200, 200, 400, 200]
        assert all(answer.headers["request-id"] == answer.headers["x-request-id"] for answer in answers)
        assert answers[0].headers["request-id"] == answers[0].json()["id"]
        other = await engine.post("/v1/chat/completions", body)
        assert "request-id" not in other.headers

    with_engine(run)


def test_a_stream_that_fails_ends_with_an_error() -> None:
    async def run(engine: FakeEngine) -> None:
        body = {"messages": [USER], "max_tokens": 9, "stream": True}
        asked = asyncio.create_task(engine.post(MESSAGES, body))
        await engine.wait_for(lambda: bool(engine.requests))
        [request] = engine.requests
        engine.client.dispatch([TextBatch([engine.text(request, "a", [0])])])
        live = engine.client.live.get(request.rid)
        while live is not None and not live.choice.opened:
            await asyncio.sleep(0)
        engine.client.dispatch([ReqError(request.rid, 503, "gone", "overloaded_error", code="instance_failed")])
        head, _, data = (await asked).text.rpartition("event: error\ndata: ")
        assert [event["type"] for event in events_of(head)][-1] == "content_block_delta"
        error = AnthropicErrorAnswer.model_validate_json(data, strict=True).error
        assert (error.type, error.message, error.code, error.status) == (
            "overloaded_error",
            "gone",
            "instance_failed",
            503,
        )

    with_engine(run, hold=True)


def test_a_stream_goes_on_where_its_answer_does() -> None:
    """Whatever the character after which it moves, both halves of the stream add up to the whole answer."""
    output = f"<think>\nRome.\n</think>\n\nSo:\n{CALL}\n{CALL.replace('Rome', 'Bari')} done"
    body = {"messages": [USER], "tools": [TOOL], "rid": "x", "stream": True, "max_tokens": 900}

    def say(engine: FakeEngine, two: Two, rid: str, text: str, at: int, *, ends: bool = False) -> None:
        tokens = list(range(at, at + len(text)))
        item = engine.text(two.old.requests[0], text, tokens, FinishType.STOP if ends else None)
        item.rid, item.reasoning = rid, None if at else ReasoningReport(False)
        engine.client.dispatch([TextBatch([item])])

    async def moved(at: int) -> dict[str, Any]:
        async with AsyncExitStack() as stack:
            two = await Two(stack, QWEN).start()
            asked = two.ask(MESSAGES, body, FOLLOWS)
            await two.old.wait_for(lambda: bool(two.old.requests))
            say(two.old, two, "x", output[:at], 0)
            await asyncio.sleep(0)
            two.new.client.dispatch([ReqArrived("x@1", KEY, 1.0, at)])
            say(two.new, two, "x@1", output[:at], 0)
            two.old.client.dispatch([ReqMoved("x", "epoch", "127.0.0.1", two.ports[1], KEY)])
            text = (await asked).text
            head, _, ticket = text.rpartition("event: moved\ndata: ") if "event: moved" in text else ("", "", text)
            rest = two.ask(MESSAGES, body, {TICKET.decode(): ticket.strip()}, at=1)
            say(two.new, two, "x@1", output[at:], at, ends=True)
            message = add_up(events_of(head + (await rest).text))
            # What is known of the prompt when a stream begins differs in this engine.
            return {name: value for name, value in message.items() if name != "usage"}

    answers = [asyncio.run(moved(at)) for at in range(1, len(output), 9)]
    assert answers == [answers[0]] * len(answers)
    assert [block["type"] for block in answers[0]["content"]] == ["thinking", "text", "tool_use", "tool_use", "text"]


def test_blocks_follow_the_order_of_events() -> None:
    def blocks(**how: bool) -> ContentBlocks:
        return ContentBlocks("r", **{"shows_thinking": True, "omits_thought": False} | how)

    events = [TextDelta("a"), TextDelta(""), ToolCall("f", "{}"), TextDelta("b"), ReasoningDelta("c"), TextDelta("d")]
    one = blocks()
    content = fold([*one.add(events), *one.end()])
    assert [block["type"] for block in content] == ["text", "tool_use", "text", "thinking", "text"]
    other = blocks(shows_thinking=False)
    assert [block.get("text") for block in fold([*other.add(events), *other.end()])] == ["a", None, "bd"]
    nothing = blocks()
    assert [*nothing.add([]), *nothing.end()] == []


def test_the_tokens_of_a_prompt_are_counted() -> None:
    async def run(engine: FakeEngine) -> None:
        body = {"model": "smollm2", "messages": [{"role": "user", "content": "a b c"}], "system": "Be brief."}
        response = await engine.post(COUNT, body)
        assert (response.status_code, response.json()) == (200, {"input_tokens": 5})
        [question] = [one for one in engine.questions if isinstance(one, EncodeReq)]
        assert question.chat is not None
        assert [turn.role for turn in question.chat.messages] == ["system", "user"]
        bad = await engine.post(COUNT, {"messages": [{"role": "user", "content": "bad"}]})
        assert (bad.status_code, bad.json()["error"]["message"]) == (400, "messages: not encodable")
        long = await engine.post(COUNT, {"messages": [{"role": "user", "content": "x" * (1 << 20)}], "system": "y"})
        assert "1048577 characters" in long.json()["error"]["message"]
        other = await engine.post(COUNT, {"model": "claude-9", "messages": [USER]})
        assert (other.status_code, other.json()["error"]["type"]) == (404, "not_found_error")

    with_engine(run)
