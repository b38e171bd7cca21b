"""What clients of other servers send: accepted, refused by name, or acted on.

Each body is one that a client was seen to send, cut to what matters.
"""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest
from support.fake_engine import CONTEXT_LENGTH, FakeEngine, events, with_engine

from pdserve.messages.conversation import ChatMessage
from pdserve.messages.requests import TokenizeReq
from pdserve.model_files.sampling_defaults import SamplingDefaults
from pdserve.server.http.app import make_app
from pdserve.server.http.bodies.fields import MAX_FREE_CHARACTERS, MAX_FREE_VALUES
from pdserve.server.http.served_model import ServedModel
from pdserve.server.http.text import models

DEEP: Any = 1
for _ in range(200):
    DEEP = [DEEP]
USER = {"role": "user", "content": "hi"}


def post(path: str, body: dict[str, Any], **options: Any) -> tuple[httpx.Response, FakeEngine]:
    async def run(engine: FakeEngine) -> tuple[httpx.Response, FakeEngine]:
        return await engine.post(path, body), engine

    return with_engine(run, **options)


def chat(**fields: Any) -> tuple[httpx.Response, FakeEngine]:
    return post("/v1/chat/completions", {"messages": [USER], "max_tokens": 1, **fields})


def asked(**fields: Any) -> TokenizeReq:
    response, engine = chat(**fields)
    assert response.status_code == 200, response.text
    return engine.requests[0]


@pytest.mark.parametrize(
    "fields",
    [
        # lm-eval's local-chat-completions
        {"messages": [{"role": "user", "content": "Q", "type": "text"}], "seed": 1234, "stop": ["Q:"]},
        # AutoGen, and LangChain's named messages
        {"messages": [{"role": "user", "content": "a", "name": "critic"}]},
        # Claude Code through a proxy
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "x"}}]}]},
        # an assistant's turn of tool calls only, sent back
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": []}, USER]},
        # openai 2.x, as the Agents SDK sets it up
        {"store": True, "metadata": {"a": "b"}, "service_tier": "flex", "prompt_cache_key": "k", "user": "u"},
        {
            "prompt_cache_retention": "24h",
            "safety_identifier": "s",
            "parallel_tool_calls": False,
            "tool_choice": "auto",
        },
        # defaults spelled out by vLLM's and SGLang's own clients
        {"use_beam_search": False, "length_penalty": 1.0, "best_of": 1, "echo": False, "tools": [], "logit_bias": {}},
        {"regex": "", "stop_regex": [], "no_stop_trim": False, "response_format": {"type": "text"}, "priority": 0},
    ],
)
def test_what_clients_send_is_accepted(fields: dict[str, Any]) -> None:
    assert chat(**fields)[0].status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"use_beam_search": True}, "use_beam_search"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"echo": True}, "echo"),
        ({"echo": 0}, "echo"),
        ({"length_penalty": True}, "length_penalty"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"bad_words": ["a"]}, "bad_words"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"chat_template_kwargs": {"tools": [{}]}}, "chat_template_kwargs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"chat_template_kwargs": {"a": DEEP}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": [1] * MAX_FREE_VALUES}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": [["x" * (MAX_FREE_CHARACTERS // 2)] * 2]}}, "chat_template_kwargs"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = chat(**fields)[0].json()["error"]
    assert (error["status"], error["param"]) == (400, param)


def test_a_field_that_is_ignored_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def run(engine: FakeEngine) -> None:
        message = {**USER, "cache_control": {}}
        for _ in range(3):
            body = {"messages": [message], "max_tokens": 1, "prompt_cache_key": "k", "store": None}
            assert (await engine.post("/v1/chat/completions", body)).status_code == 200

    with caplog.at_level(logging.INFO):
        with_engine(run)
    lines = [r.getMessage() for r in caplog.records if "ignored" in r.getMessage()]
    assert [line.split()[2] for line in lines] == ["messages[].cache_control,", "prompt_cache_key,"]


@pytest.mark.parametrize("name", ["prefix", "partial"])
def test_a_last_message_that_is_only_a_beginning_is_continued(name: str) -> None:
    begun = {"role": "assistant", "content": "So", name: True}
    for fields in ({}, {"add_generation_prompt": True}):
        going_on = asked(messages=[USER, begun], **fields).chat
        assert going_on is not None
        assert (going_on.add_generation_prompt, going_on.continue_final_message) == (False, True)
    for messages in ([USER, {**begun, name: False}], [USER, begun, USER]):
        ended = asked(messages=messages).chat
        assert ended is not None
        assert (ended.add_generation_prompt, ended.continue_final_message) == (True, False)
    error = chat(messages=[{**USER, name: True}])[0].json()["error"]
    assert (error["status"], error["param"]) == (400, f"messages[0].{name}")


def test_what_asks_for_another_prompt_reaches_the_tokenizer() -> None:
    plain = asked()
    assert plain.chat is not None
    assert (plain.chat.add_generation_prompt, plain.chat.continue_final_message) == (True, False)
    assert (plain.chat.template_args, plain.add_special_tokens) == ({}, None)
    thinking = asked(chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low")
    assert thinking.chat is not None
    assert thinking.chat.template_args == {"enable_thinking": False, "reasoning_effort": "low"}
    going_on = asked(messages=[USER, {"role": "assistant", "content": "So"}], continue_final_message=True)
    assert going_on.chat is not None
    assert (going_on.chat.add_generation_prompt, going_on.chat.continue_final_message) == (False, True)
    bare = asked(add_generation_prompt=False, add_special_tokens=True)
    assert bare.chat is not None
    assert (bare.chat.add_generation_prompt, bare.add_special_tokens) == (False, True)
    turns = [{"role": "user", "content": "a", "name": "Ann"}, {"role": "assistant", "reasoning_content": "hm"}, USER]
    named = asked(messages=turns)
    assert named.chat is not None
    assert named.chat.messages[:2] == [ChatMessage("user", "a", "Ann"), ChatMessage("assistant", None, None, "hm")]


def test_completions_without_special_tokens() -> None:
    _, engine = post("/v1/completions", {"prompt": "a", "max_tokens": 1, "add_special_tokens": False})
    assert engine.requests[0].add_special_tokens is False


def test_biases_and_the_cache_salt_reach_the_engine() -> None:
    request = asked(logit_bias={"5": -100, "7": 1.5}, cache_salt="tenant")
    assert (request.sampling.logit_bias, request.extra_key) == ({5: -100.0, 7: 1.5}, "tenant")
    assert asked(cache_salt="tenant", extra_key="mine").extra_key == "mine"


def test_token_ids_come_back_on_request() -> None:
    answer = chat(return_token_ids=True, max_tokens=2)[0].json()
    assert (answer["prompt_token_ids"], answer["choices"][0]["token_ids"]) == ([50, 51], [0, 1])
    chunks = events(chat(return_token_ids=True, max_tokens=2, stream=True)[0])
    assert chunks[0]["prompt_token_ids"] == [50, 51]
    assert [i for c in chunks for i in c["choices"][0].get("token_ids", [])] == [0, 1]
    body: dict[str, Any] = {"prompt": "a", "max_tokens": 1, "return_token_ids": True}
    [choice] = post("/v1/completions", body)[0].json()["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([50, 51], [0])
    body = {"text": "a", "sampling_params": {"max_new_tokens": 1}, "return_prompt_token_ids": True}
    assert post("/generate", body)[0].json()["meta_info"]["prompt_token_ids"] == [50, 51]


def test_tokens_can_be_named_by_their_ids() -> None:
    body = {"prompt": "a", "max_tokens": 1, "logprobs": 1, "return_tokens_as_token_ids": True}
    logprobs = post("/v1/completions", body)[0].json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:0"]
    assert logprobs["top_logprobs"] == [{"token_id:90": -1.5, "token_id:0": -0.5}]


def test_a_streamed_echo_brings_the_prompts_logprobs_first() -> None:
    body = {"prompt": [1, 2], "max_tokens": 2, "logprobs": 0, "echo": True, "stream": True}
    choices = [c["choices"][0] for c in events(post("/v1/completions", body)[0])]
    assert "".join(c["text"] for c in choices) == "p0 p1 w0 w1 "
    assert [t for c in choices for t in c["logprobs"]["tokens"]] == ["p0 ", "p1 ", "w0 ", "w1 "]
    assert [o for c in choices for o in c["logprobs"]["text_offset"]] == [0, 3, 6, 9]


def test_any_of_several_names_is_served_and_the_first_answers() -> None:
    names = {"served_model_name": "big, small,"}
    for model in ("big", "small", "default", "smollm2"):
        answer, _ = post("/v1/completions", {"model": model, "prompt": "a", "max_tokens": 1}, **names)
        assert answer.json()["model"] == "big"

    async def run(engine: FakeEngine) -> None:
        cards = (await engine.get("/v1/models")).json()["data"]
        assert [card["id"] for card in cards] == ["big", "small"]
        assert {card["max_model_len"] for card in cards} == {CONTEXT_LENGTH}
        assert (await engine.get("/v1/models/small")).json() == cards[1]

    with_engine(run, **names)


def test_the_models_own_defaults_fill_what_is_left_out() -> None:
    async def run(engine: FakeEngine) -> None:
        defaults = SamplingDefaults(temperature=0.25, top_k=20)
        engine.app = make_app(engine.options, engine.client, "e1", ServedModel(("m",), "m", defaults))
        await engine.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "temperature": 1.0})
        await engine.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "top_k": None})
        await engine.post("/generate", {"text": "a", "sampling_params": {"top_k": -1}})
        got = [(r.sampling.temperature, r.sampling.top_k) for r in engine.requests]
        assert got == [(1.0, 20), (0.25, 20), (0.25, -1)]

    with_engine(run)


def test_an_incremental_stream_tells_each_thing_once() -> None:
    body = {
        "text": "a",
        "sampling_params": {"max_new_tokens": 3},
        "stream": True,
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    ways: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"incremental": True}, {}),
        ({}, {"incremental_streaming_output": True}),
    ]
    for fields, options in ways:
        chunks = events(post("/generate", {**body, **fields}, **options)[0])
        assert "".join(c["text"] for c in chunks) == "w0 w1 w2 "
        assert [i for c in chunks for i in c["output_ids"]] == [0, 1, 2]
        assert [e[1] for c in chunks for e in c["meta_info"]["output_token_logprobs"]] == [0, 1, 2]
        assert [e[1] for c in chunks for e in c["meta_info"]["input_token_logprobs"]] == [50, 51]
        assert chunks[-1]["meta_info"]["completion_tokens"] == 3
    cumulative = events(post("/generate", {**body, "incremental": False}, incremental_streaming_output=True)[0])
    assert cumulative[-1]["text"] == "w0 w1 w2 "


@pytest.mark.parametrize(
    ("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]}), ("/v1/models", None)]
)
def test_a_question_about_text_has_a_limit(monkeypatch: pytest.MonkeyPatch, path: str, body: dict | None) -> None:
    monkeypatch.setattr(models, "TIMEOUT_SECONDS", 0.01)

    async def run(engine: FakeEngine) -> None:
        answer = await (engine.get(path) if body is None else engine.post(path, body))
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "the tokenizer did not answer within 0.01 s"

    with_engine(run, mute=True)


def test_tokenize_and_detokenize() -> None:
    async def run(engine: FakeEngine) -> None:
        one = (await engine.post("/tokenize", {"prompt": "a bcd", "return_token_strs": True})).json()
        assert one == {"count": 2, "max_model_len": CONTEXT_LENGTH, "tokens": [1, 3], "token_strs": ["a", "bcd"]}
        many = (await engine.post("/tokenize", {"prompt": ["a", "b c"]})).json()
        assert (many["count"], many["tokens"]) == ([1, 2], [[1], [1, 1]])
        chat = (await engine.post("/tokenize", {"messages": [USER], "add_generation_prompt": False})).json()
        assert chat["tokens"] == [2]
        error = (await engine.post("/tokenize", {"prompt": "bad"})).json()["error"]
        assert (error["param"], error["message"]) == ("prompt", "prompt: not encodable")
        for path, body, status in (
            ("/tokenize", {}, 400),
            ("/tokenize", {"prompt": "a" * 2**20}, 200),
            ("/tokenize", {"prompt": ["a" * 2**19, "a" * 2**19, "a"]}, 400),
            ("/tokenize", {"messages": [USER | {"content": "a" * (2**20 + 1)}]}, 400),
            ("/detokenize", {"tokens": [1] * 2**17}, 200),
            ("/detokenize", {"tokens": [[1] * 2**17, [1]]}, 400),
        ):
            assert (await engine.post(path, body)).status_code == status, (path, status)
        assert (await engine.post("/detokenize", {"tokens": [1, 2]})).json() == {"prompt": "x xx", "text": "x xx"}
        assert (await engine.post("/detokenize", {"tokens": [[1], [2]]})).json()["text"] == ["x", "xx"]

    with_engine(run)
