"""Tool calls through a router and a pair, from a model that follows a script: all but its forward pass is real."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.processes import Pair, pd_pair
from support.responses_api import check_stream, events_of
from support.scripted_model import scripted_args

pytest.importorskip("canitoolcall")
from canitoolcall.probe import BUILTIN_SCENARIOS, probe

EVENT = {
    "title": "Design review",
    "start": "2026-10-01T15:00:00Z",
    "attendees": [{"name": "Ana", "email": "ana@example.com"}, {"name": "Bo", "email": "bo@example.com"}],
    "location": {"city": "Berlin", "room": "4.12"},
}
NOTE = {"title": "Grüße aus Zürich", "body": "Café ☕ in 東京 — naïve résumé 🚀"}
NOTES = {"type": "function", "function": {"name": "save_note", "parameters": {"type": "object"}}}


def call(name: str, arguments: dict[str, Any]) -> str:
    """Return a call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


OUTPUTS = {
    "weather in Paris right now": call("get_weather", {"city": "Paris"}),
    "once per city": "\n".join(call("get_weather", {"city": city}) for city in ("Paris", "Tokyo")),
    "17 + 25": "42",
    "Create an event": call("create_event", EVENT),
    "Save a note": call("save_note", NOTE),
    "something about Lisbon": call("get_weather", {"city": "Lisbon"}),
    "What time is it": call("get_server_time", {}),
    '"sky": "clear"': "It is 18 degrees in Paris, and clear.",
    "Think it through": f"<think>\n9.9 is 9.90, and larger.\n</think>\n\n{call('record_answer', {'answer': '9.9'})}",
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Any:
    folder = tmp_path_factory.mktemp("scripted")
    small = ("--chunked-prefill-size", "64", "--max-total-tokens", "1024", "--schedule-conservativeness", "0.3")
    with pd_pair(folder, "tcp", *scripted_args(folder, OUTPUTS), *small) as started:
        yield started
        started.assert_all_returned()


def test_live_checks_of_tool_calls_pass_through_a_router(pair: Pair) -> None:
    report = probe(pair.router.url + "/v1", "scripted")
    everything = {"pass": 3 * len(BUILTIN_SCENARIOS), "fail": 0, "error": 0, "skip": 0}
    assert report.summary() == everything, report.render_text()
    assert not any(outcome.warnings for outcome in report.outcomes), report.render_text()
    assert pair.decode.info()["disaggregation"]["received"]["done"] >= len(BUILTIN_SCENARIOS)


def test_reasoning_is_separate_from_the_call(pair: Pair) -> None:
    tool = {"type": "function", "function": {"name": "record_answer", "parameters": {"type": "object"}}}
    body = {"messages": [{"role": "user", "content": "Think it through"}], "tools": [tool], "max_tokens": 200}
    answer = pair.router.post("/v1/chat/completions", body).json()
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"].strip() == "9.9 is 9.90, and larger."
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"answer": "9.9"}
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_ollamas_clients_get_reasoning_and_calls_in_lines_and_as_a_whole(pair: Pair) -> None:
    tool = {"type": "function", "function": {"name": "record_answer", "parameters": {"type": "object"}}}
    options = {"num_predict": 200, "temperature": 0}
    body = {"model": "scripted:latest", "messages": [{"role": "user", "content": "Think it through"}], "tools": [tool]}
    found = pair.router.post("/api/chat", {**body, "options": options})
    assert found.headers["content-type"] == "application/x-ndjson"
    *lines, last = map(json.loads, found.text.splitlines())
    whole = pair.router.post("/api/chat", {**body, "options": options, "stream": False}).json()
    [made] = whole["message"]["tool_calls"]
    assert (made["function"]["name"], made["function"]["arguments"]) == ("record_answer", {"answer": "9.9"})
    assert whole["message"]["thinking"].strip() == "9.9 is 9.90, and larger."
    assert "".join(line["message"].get("thinking", "") for line in lines) == whole["message"]["thinking"]
    calls = [call["function"] for line in lines for call in line["message"].get("tool_calls", ())]
    assert calls == [made["function"]]
    for end in (last, whole):
        assert (end["done"], end["done_reason"]) == (True, "stop")
        assert (end["prompt_eval_count"], end["eval_count"]) == (last["prompt_eval_count"], last["eval_count"])
        assert end["total_duration"] >= end["prompt_eval_duration"] + end["eval_duration"] > 0
    for answer in (
        pair.router.post("/api/chat", {**body, "options": {"top_p": 2}}),
        pair.router.post("/api/generate", {"prompt": "x " * 5000}),
    ):
        assert (answer.status_code, answer.json()["status"]) == (400, 400)
        assert isinstance(answer.json()["error"], str)


def test_anthropics_messages_pass_through_a_router(pair: Pair) -> None:
    tool = {"name": "record_answer", "description": "Keep the answer.", "input_schema": {"type": "object"}}
    server_tool = {"type": "web_search_20250305", "name": "web_search"}
    body = {"messages": [{"role": "user", "content": "Think it through"}], "tools": [tool, server_tool]}
    whole = pair.router.post("/v1/messages?beta=true", body | {"max_tokens": 200, "rid": "msg_1"}).json()
    thinking, call = whole["content"]
    assert (thinking["thinking"].strip(), call["input"]) == ("9.9 is 9.90, and larger.", {"answer": "9.9"})
    assert whole["stop_reason"] == "tool_use"
    assert whole["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    stream = pair.router.post("/v1/messages", body | {"max_tokens": 200, "rid": "msg_1", "stream": True}).text
    begun, _, *events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: ")]
    usage = begun["message"]["usage"]
    assert usage["cache_read_input_tokens"] > 0
    length = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert pair.router.post("/v1/messages/count_tokens", body).json() == {"input_tokens": length}
    started = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [block.get("id") for block in started] == [None, call["id"]]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    pieces = [delta["partial_json"] for delta in deltas if delta["type"] == "input_json_delta"]
    assert json.loads("".join(pieces)) == {"answer": "9.9"}
    assert len(pieces) > 1
    assert (events[-2]["delta"]["stop_reason"], events[-1]) == ("tool_use", {"type": "message_stop"})
    refused = pair.router.post("/v1/messages", body | {"max_tokens": 1, "model": "another"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (404, "not_found_error")


def test_a_result_in_anthropics_shape_is_answered(pair: Pair) -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    result = {
        "type": "tool_result",
        "tool_use_id": "toolu_1",
        "content": [{"type": "text", "text": '{"sky": "clear"}'}],
    }
    turns = [{"role": "user", "content": "Look outside"}, {"role": "assistant", "content": [call]}]
    body = {"messages": [*turns, {"role": "user", "content": [result]}], "max_tokens": 50}
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    answer = pair.router.post("/v1/messages", body | {"tools": tools, "stop_sequences": [", and"]}).json()
    assert answer["content"] == [{"type": "text", "text": "It is 18 degrees in Paris"}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", ", and")


def test_calls_stay_whole_when_requests_are_retracted(pair: Pair) -> None:
    def save(number: int) -> Any:
        # Prompts differ from their first token, so that their KV does not fit together.
        body = {"messages": [{"role": "user", "content": f"{number}: Save a note {number}"}], "tools": [NOTES]}
        return pair.router.post("/v1/chat/completions", body | {"max_tokens": 200, "rid": f"note-{number}"}).json()

    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(save, range(24)))
    for answer in answers:
        (made,) = answer["choices"][0]["message"]["tool_calls"]
        assert json.loads(made["function"]["arguments"]) == NOTE
    assert sum(server.info()["retractions"] for server in (pair.prefill, pair.decode)) > 0


def responses(pair: Pair, given: Any, **fields: Any) -> dict[str, Any]:
    """Return the response that a checked stream of events ends with."""
    tools = [{"type": "function", "name": name} for name in ("get_weather", "record_answer")]
    body = {"input": given, "tools": tools, "max_output_tokens": 200, "stream": True, **fields}
    return check_stream(events_of(pair.router.post("/v1/responses", body).text))


def test_an_agent_of_the_responses_api_goes_on_by_ids(pair: Pair) -> None:
    first = responses(pair, "weather in Paris right now")
    [made] = first["output"]
    assert (made["type"], json.loads(made["arguments"])) == ("function_call", {"city": "Paris"})
    output = {"type": "function_call_output", "call_id": made["call_id"], "output": '{"sky": "clear"}'}
    second = responses(pair, [output], previous_response_id=first["id"])
    assert second["output"][0]["content"][0]["text"] == OUTPUTS['"sky": "clear"']
    assert second["usage"]["input_tokens_details"]["cached_tokens"] > 0
    # The same conversation by its items, with nothing kept.
    question = {"role": "user", "content": "weather in Paris right now"}
    again = responses(pair, [question, made, output], store=False)
    assert again["output"][0]["content"] == second["output"][0]["content"]
    kept = {
        (server.url, name): server.client.get(f"{server.url}/v1/responses/{response['id']}")
        for server in (pair.router, pair.prefill, pair.decode)
        for name, response in (("second", second), ("again", again))
    }
    assert kept.pop((pair.router.url, "second")).json() == second
    assert {answer.status_code for answer in kept.values()} == {404}


def test_reasoning_is_an_item_of_a_response(pair: Pair) -> None:
    answer = responses(pair, "Think it through", include=["reasoning.encrypted_content"], store=False)
    thought, made = answer["output"]
    assert thought["content"][0]["text"].strip() == "9.9 is 9.90, and larger."
    assert (made["name"], json.loads(made["arguments"])) == ("record_answer", {"answer": "9.9"})
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


def test_a_prompt_without_an_entry_gets_an_empty_answer(pair: Pair) -> None:
    answer = pair.router.post("/generate", {"text": "Nothing of the script."}).json()
    assert (answer["text"], answer["meta_info"]["finish_reason"]["type"]) == ("", "stop")
