"""``POST /v1/responses``, through the real app before an engine that sends given texts."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import httpx
import orjson
import pytest
from support.fake_engine import FakeEngine, with_engine
from support.responses_api import check_stream, events_of

from pdserve.messages.conversation import ChatMessage, ChatToolCall, Conversation
from pdserve.messages.outputs import FinishType, ReasoningReport, ReqError, TextBatch
from pdserve.runtime.web.moved_answer import TICKET
from pdserve.server.http.bodies.field_names import IGNORED_HEADER
from pdserve.server.http.bodies.tool_fields import MAX_TOOL_CALLS
from pdserve.server.http.responses.answers import ResponseAnswer
from pdserve.server.http.responses.sealed import seal
from tests.unit.server.test_http_moved import FOLLOWS, Two
from tests.unit.server.test_http_tools import NINE_TOKENS, OUTPUT, QWEN, SCHEMA

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "weather", "description": "Weather now.", "parameters": SCHEMA, "strict": False}
SENT_TOOL = {"type": "function", "function": {name: TOOL[name] for name in ("name", "description", "parameters")}}
IGNORED = IGNORED_HEADER.decode()
ASK = "Weather in Rome?"


def ask(
    body: dict[str, Any],
    output: str = OUTPUT,
    *,
    piece: int = 7,
    finish: FinishType = FinishType.STOP,
    reasoning: ReasoningReport | None = NINE_TOKENS,
    template: str = QWEN,
    error: ReqError | None = None,
    **options: Any,
) -> tuple[httpx.Response, FakeEngine]:
    """Answer a request with ``output``, in pieces of some characters, each a token; ``error`` comes in place of its
    end."""

    async def run(engine: FakeEngine) -> tuple[httpx.Response, FakeEngine]:
        asking = asyncio.create_task(engine.post(PATH, {"input": ASK, "store": False, **body}))
        while not engine.requests and not asking.done():
            await asyncio.sleep(0)
        for request in engine.requests:
            pieces = [output[i : i + piece] for i in range(0, len(output), piece)]
            for i, text in enumerate(pieces):
                is_last = i + 1 == len(pieces)
                item = engine.text(request, text, [i], finish if is_last and error is None else None)
                item.reasoning = reasoning if i in (0, len(pieces) - 1) else None
                engine.client.dispatch([TextBatch([item])])
                # Each piece is an event of its own.
                for _ in range(5):
                    await asyncio.sleep(0)
            if error is not None:
                engine.client.dispatch([ReqError(request.rid, error.status, error.message, error.kind)])
        return await asking, engine

    return with_engine(run, hold=True, template=template, **options)


def response_of(response: httpx.Response) -> dict[str, Any]:
    """Return a plain answer, which fits the declared model."""
    assert response.status_code == 200, response.text
    ResponseAnswer.model_validate_json(response.content, strict=True)
    return response.json()


def sent(body: dict[str, Any], **options: Any) -> Conversation:
    """Return the conversation that the engine gets for a body."""
    response, engine = ask(body, **options)
    assert response.status_code == 200, response.text
    chat = engine.sent[0].chat
    assert chat is not None
    return chat


def refused(body: dict[str, Any], **options: Any) -> tuple[str, str]:
    """Return ``param`` and message of the 400 for a body."""
    response, engine = ask(body, **options)
    assert (response.status_code, engine.sent) == (400, []), response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error["param"], error["message"]


def test_reasoning_text_and_calls_are_items() -> None:
    response, engine = ask({"tools": [TOOL], "rid": "resp_r"})
    answer = response_of(response)
    thought, message, rome, bari = answer["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Rome, so a call."}]
    assert message["content"] == [{"type": "output_text", "text": "Let me look.", "annotations": [], "logprobs": []}]
    assert [json.loads(call["arguments"]) for call in (rome, bari)] == [{"city": "Rome"}, {"city": "Bari"}]
    assert [item["id"] for item in answer["output"]] == ["rs_r_0", "msg_r_1", "fc_r_2", "fc_r_3"]
    assert rome["call_id"] != bari["call_id"]
    assert (answer["id"], answer["status"], answer["incomplete_details"]) == ("resp_r", "completed", None)
    assert answer["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": len(OUTPUT) // 7 + 1,
        "output_tokens_details": {"reasoning_tokens": 9},
        "total_tokens": 7 + len(OUTPUT) // 7 + 1,
    }
    assert engine.sent[0].chat == Conversation([ChatMessage("user", ASK)], tools=[SENT_TOOL])


@pytest.mark.parametrize("piece", [1, 3, 500])
def test_a_stream_tells_the_same_step_by_step(piece: int) -> None:
    body = {"tools": [TOOL], "rid": "r", "include": ["reasoning.encrypted_content"]}
    whole = response_of(ask(body, piece=piece)[0])
    events = events_of(ask(body | {"stream": True}, piece=piece)[0].text)
    streamed = check_stream(events)
    times = ("created_at", "completed_at")
    assert {**streamed, **{name: whole[name] for name in times}} == whole
    assert events[-1]["type"] == "response.completed"
    assert whole["output"][0]["encrypted_content"] == seal("Rome, so a call.")


@pytest.mark.parametrize(
    ("finish", "status", "details"),
    [
        (FinishType.LENGTH, "incomplete", {"reason": "max_output_tokens"}),
        (FinishType.TIMEOUT, "incomplete", None),
        (FinishType.ABORT, "cancelled", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_is_cut_says_so(finish: FinishType, status: str, details: Any, stream: bool) -> None:
    response, _ = ask({"stream": stream}, "one two", finish=finish)
    events = events_of(response.text) if stream else []
    answer = check_stream(events) if stream else response_of(response)
    assert (answer["status"], answer["incomplete_details"]) == (status, details)
    assert (answer["output"][0]["status"], answer["completed_at"]) == ("incomplete", None)
    assert not stream or events[-1]["type"] == "response.incomplete"
    assert (answer.get("pdserve_finish") is None) == (finish is FinishType.LENGTH)


@pytest.mark.parametrize("piece", [1, 7, 500])
def test_white_space_between_items_is_no_message(piece: int) -> None:
    output = OUTPUT.replace("Let me look.\n", "\n")
    items = check_stream(events_of(ask({"tools": [TOOL], "stream": True}, output, piece=piece)[0].text))["output"]
    assert [item["type"] for item in items] == ["reasoning", "function_call", "function_call"]
    assert response_of(ask({}, " ", template="")[0])["output"][0]["content"][0]["text"] == " "


def test_an_error_in_the_middle_ends_the_stream_with_both_events() -> None:
    response, _ = ask({"stream": True}, "one two three", error=ReqError("", 500, "it broke"))
    events = events_of(response.text)
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["status"] == "failed"
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "it broke"}
    last = response.text.split("\n\n")[-2]
    assert last.startswith("event: error\ndata: ")
    error = json.loads(last.partition("data: ")[2])
    assert (error["type"], error["error"]["message"]) == ("error", "it broke")
    assert error["sequence_number"] > events[-1]["sequence_number"]


@pytest.mark.parametrize("field", ["text", "messages"])
def test_an_error_before_the_first_token_is_a_status(field: str) -> None:
    async def run(engine: FakeEngine) -> httpx.Response:
        engine.errors = [ReqError("", 400, "too long", field=field, code="context_length_exceeded")]
        return await engine.post(PATH, {"input": "a", "stream": True, "store": False})

    response = with_engine(run)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "input", "context_length_exceeded")


def test_items_become_turns() -> None:
    items = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": ASK}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": seal("Look it up.")},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Yes.", "annotations": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "18 degrees"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "none"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Done."}], "encrypted_content": "gAAA"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No more."}]},
        {"role": "user", "content": "Why?"},
    ]
    chat = sent({"input": items, "instructions": "Be brief.", "reasoning": {"effort": "low"}})
    assert chat.template_args == {"reasoning_effort": "low"}
    assert chat.messages == [
        ChatMessage("system", "Be brief.\n\nBe kind."),
        ChatMessage("user", ASK),
        ChatMessage(
            "assistant",
            "Yes.",
            reasoning_content="Look it up.",
            tool_calls=[ChatToolCall("c1", "weather", {"city": "Rome"}), ChatToolCall("c2", "weather", {})],
        ),
        ChatMessage("tool", "18 degrees", tool_call_id="c1"),
        ChatMessage("tool", "none", tool_call_id="c2"),
        ChatMessage("assistant", "No more.", reasoning_content="Done."),
        ChatMessage("user", "Why?"),
    ]


def test_an_output_can_be_sent_back_as_it_came() -> None:
    answer = response_of(ask({"tools": [TOOL], "include": ["reasoning.encrypted_content"]})[0])
    outputs = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "18"}
        for item in answer["output"]
        if item["type"] == "function_call"
    ]
    chat = sent({"input": [{"role": "user", "content": ASK}, *answer["output"], *outputs], "tools": [TOOL]})
    assert [message.role for message in chat.messages] == ["user", "assistant", "tool", "tool"]
    assert (chat.messages[1].content, chat.messages[1].reasoning_content) == ("Let me look.", "Rome, so a call.")


CALLED = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
DONE = {"type": "function_call_output", "call_id": "c", "output": "18"}


def test_what_is_said_after_a_call_does_not_part_it_from_its_output() -> None:
    said = [{"role": "assistant", "content": text} for text in ("One.", "Two.")]
    again = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Again."}]}
    items = [said[0], CALLED, said[1], again, CALLED | {"call_id": "d"}, DONE, DONE | {"call_id": "d"}, said[0]]
    calls = [ChatToolCall("c", "weather", {}), ChatToolCall("d", "weather", {})]
    assert sent({"input": items}).messages == [
        ChatMessage("assistant", ["One.", "Two."], reasoning_content="Again.", tool_calls=calls),
        ChatMessage("tool", "18", tool_call_id="c"),
        ChatMessage("tool", "18", tool_call_id="d"),
        ChatMessage("assistant", "One."),
    ]


@pytest.mark.parametrize("sealed", ["gAAAA", "pdserve:é", "pdserve:/w==", "pdserve:a", ""])
def test_reasoning_that_cannot_be_read_is_left_out(sealed: str) -> None:
    empty = {"type": "reasoning", "summary": [], "encrypted_content": sealed}
    read = [{"type": "reasoning", "encrypted_content": seal(text)} for text in ("Hm.", "Yes.")]
    user = {"role": "user", "content": "a"}
    items = [empty, user, read[0], empty, read[1], empty, CALLED, empty, DONE, empty, user]
    assert sent({"input": items}).messages == [
        ChatMessage("user", "a"),
        ChatMessage("assistant", None, reasoning_content="Hm.\n\nYes.", tool_calls=[ChatToolCall("c", "weather", {})]),
        ChatMessage("tool", "18", tool_call_id="c"),
        ChatMessage("user", "a"),
    ]


def test_no_effort_turns_reasoning_off() -> None:
    body = {"reasoning": {"effort": "none"}, "chat_template_kwargs": {"thinking": True}}
    assert sent(body).template_args == {"reasoning_effort": "none", "enable_thinking": False, "thinking": True}


NESTED = '{"name": "weather", "arguments": {"a": ' + "[" * 70 + "]" * 70 + "}}"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_no_request_could_send_back_is_text(stream: bool) -> None:
    output = f"<tool_call>\n{NESTED}\n</tool_call>"
    response, _ = ask({"tools": [TOOL], "stream": stream}, output, stream_tool_arguments=False)
    answer = check_stream(events_of(response.text)) if stream else response_of(response)
    (message,) = answer["output"]
    assert json.loads(message["content"][0]["text"]) == json.loads(NESTED)
    assert len(sent({"input": [{"role": "user", "content": ASK}, message]}).messages) == 2


def test_arguments_are_streamed_while_the_model_writes_them() -> None:
    output = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    found = events_of(ask({"tools": [TOOL], "stream": True}, output, piece=3)[0].text)
    (call,) = check_stream(found)["output"]
    assert (call["arguments"], call["status"]) == ('{"city": "Rome"}', "completed")
    assert sum(event["type"] == "response.function_call_arguments.delta" for event in found) > 4


@pytest.mark.parametrize(
    ("output", "finish"),
    [
        (f"<tool_call>\n{NESTED}\n</tool_call>", FinishType.STOP),
        ('<tool_call>\n{"name": "weather", "arguments": {"city": "Ro', FinishType.LENGTH),
        ('<tool_call>\n{"name": "weather", "arguments": {"city": Rome}}', FinishType.STOP),
    ],
    ids=["too deep", "cut", "no JSON"],
)
def test_a_call_that_was_begun_and_is_none_is_incomplete(output: str, finish: FinishType) -> None:
    """A conversation can go on after it. It is left out, and so is what the client answers to it."""
    response, _ = ask({"tools": [TOOL], "stream": True}, output, finish=finish)
    call, *_ = check_stream(events_of(response.text))["output"]
    assert (call["type"], call["status"]) == ("function_call", "incomplete")
    question = {"role": "user", "content": ASK}
    answered = {"type": "function_call_output", "call_id": call["call_id"], "output": "not JSON"}
    assert sent({"input": [question, call, answered, question]}).messages == [ChatMessage("user", ASK)] * 2
    assert refused({"input": [question, {**call, "status": "completed"}]})[0] == "input[1]"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_new_tokens"])
def test_limits_of_other_apis_are_ignored_with_a_hint(name: str) -> None:
    response, _ = ask({name: 3})
    assert response.headers[IGNORED] == f"{name};did-you-mean=max_output_tokens"


def test_tools_of_other_types_are_ignored_and_named() -> None:
    others = [
        {"type": "local_shell"},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        {"type": "web_search", "external_web_access": False, "filters": {"allowed_domains": ["example.org"]}},
    ]
    for unknown in ("warn", "refuse"):
        response, engine = ask({"tools": [others[0], TOOL, *others[1:]]}, unknown_fields=unknown)
        answer = response_of(response)
        assert engine.sent[0].chat is not None
        assert engine.sent[0].chat.tools == [SENT_TOOL]
        assert [tool["name"] for tool in answer["tools"]] == ["weather"]
        assert response.headers[IGNORED] == "tools[0].type, tools[1].strict, tools[2].type, tools[3].type"
    response, engine = ask({"tools": others})
    assert engine.sent[0].chat == Conversation([ChatMessage("user", ASK)])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"n": 2}, "n"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "message", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
        ({"input": [{"type": "custom_tool_call", "name": "x", "input": "y"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "x", "arguments": "{"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"name": "x"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [TOOL], "text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 2, "min_tokens": 3}, "min_tokens"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
    ],
)
def test_what_is_not_served_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    found, message = refused(body)
    assert found == param
    assert param.split(".")[-1].split("[")[0] in message


@pytest.mark.parametrize(
    ("given", "source"),
    [
        ({"type": "json_schema", "name": "city", "schema": SCHEMA, "strict": True}, SCHEMA),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "text"}, None),
    ],
)
def test_the_text_format_is_a_grammar(given: dict[str, Any], source: Any) -> None:
    response, engine = ask({"text": {"format": given, "verbosity": "low"}}, "{}", template="")
    grammar = engine.sent[0].sampling.grammar
    assert (None if grammar is None else json.loads(grammar.source)) == source
    assert {**given, **response_of(response)["text"]["format"]} == given
    assert response.headers[IGNORED] == "text.verbosity"


def test_a_call_can_be_forced() -> None:
    for choice in ("required", {"type": "function", "name": "weather"}):
        text = {"format": {"type": "json_object"}}
        response, engine = ask({"tools": [TOOL], "tool_choice": choice, "text": text})
        grammar = engine.sent[0].sampling.grammar
        assert grammar is not None
        assert (grammar.kind, response_of(response)["tool_choice"]) == ("tool_calls", choice)
    chat = sent({"tools": [TOOL], "tool_choice": "none"})
    assert chat.tools is None


def test_one_call_at_a_time() -> None:
    answer = response_of(ask({"tools": [TOOL], "parallel_tool_calls": False})[0])
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message", "function_call"]


@pytest.mark.parametrize("stream", [False, True])
def test_no_more_calls_than_a_request_may_send_back(stream: bool) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    response, _ = ask({"tools": [TOOL], "stream": stream}, call * (MAX_TOOL_CALLS + 1))
    answer = check_stream(events_of(response.text)) if stream else response_of(response)
    assert len(answer["output"]) == MAX_TOOL_CALLS


def test_what_a_request_says_is_answered_again() -> None:
    body = {
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "max_output_tokens": 20,
        "temperature": 0.5,
        "top_p": 0.5,
        "user": "ana",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "store": False,
    }
    response, engine = ask(body | {"model": "m"}, served_model_name="m")
    answer = response_of(response)
    assert {name: answer[name] for name in body} == body
    assert answer["model"] == "m"
    sampling = engine.sent[0].sampling
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p) == (20, 0.5, 0.5)
    assert answer["id"].startswith("resp_")


@pytest.mark.parametrize("cut", [1, 3, 5])
def test_a_moved_stream_goes_on_where_it_was(cut: int) -> None:
    """Its events are those of a stream that did not move."""
    output = "<think>\nHm.\n</think>\n\nOne two <tool_call>\n" + '{"name": "weather", "arguments": {}}\n</tool_call>'
    pieces = [output[i : i + 11] for i in range(0, len(output), 11)]
    body = {"input": ASK, "tools": [TOOL], "rid": "x", "stream": True, "store": False}

    def tell(two: Two, engine: FakeEngine, rid: str, first: int, last: int) -> None:
        for i in range(first, last):
            finish = FinishType.STOP if i + 1 == len(pieces) else None
            item = engine.text(two.old.requests[0], pieces[i], [i], finish)
            item.rid, item.reasoning = rid, ReasoningReport(False, 2)
            engine.client.dispatch([TextBatch([item])])

    async def run(moves: bool) -> str:
        async with AsyncExitStack() as stack:
            two = await Two(stack, QWEN).start()
            asked = two.ask(PATH, body, FOLLOWS)
            await two.old.wait_for(lambda: bool(two.old.requests))
            tell(two, two.old, "x", 0, cut)
            live = two.old.client.live.get("x")
            while live is not None and live.choice.sent_chars < sum(map(len, pieces[:cut])):
                await asyncio.sleep(0)
            if not moves:
                tell(two, two.old, "x", cut, len(pieces))
                return (await asked).text
            two.move(0)
            head, _, ticket = (await asked).text.rpartition("event: moved\ndata: ")
            rest = two.ask(PATH, body, {TICKET.decode(): ticket.strip()}, at=1)
            tell(two, two.new, "x@1", 0, cut)
            tell(two, two.new, "x@1", cut, len(pieces))
            return head + (await rest).text

    stayed, moved = (merged(events_of(asyncio.run(run(moves)))) for moves in (False, True))
    assert moved == stayed


def merged(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return events with adjacent deltas joined, and without times and numbers."""
    joined: list[dict[str, Any]] = []
    for event in events:
        event = orjson.loads(orjson.dumps(event))
        del event["sequence_number"]
        for name in ("created_at", "completed_at"):
            event.get("response", {}).pop(name, None)
        if joined and event["type"].endswith(".delta") and joined[-1]["type"] == event["type"]:
            joined[-1]["delta"] += event["delta"]
        else:
            joined.append(event)
    return joined
