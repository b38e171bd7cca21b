"""The OpenAI endpoints through the real app, in front of a fake engine."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from support.fake_engine import FakeEngine, events, with_engine

from pdserve.messages.conversation import ChatMessage
from pdserve.messages.outputs import FinishType, ReqError, TextBatch
from pdserve.messages.requests import Bootstrap, LogprobOptions

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def post(path: str, body: dict[str, Any], **options: Any) -> tuple[httpx.Response, FakeEngine]:
    async def run(engine: FakeEngine) -> tuple[httpx.Response, FakeEngine]:
        return await engine.post(path, body), engine

    return with_engine(run, **options)


def completions(body: dict[str, Any]) -> tuple[httpx.Response, FakeEngine]:
    return post("/v1/completions", body)


def test_completion() -> None:
    response, engine = completions({"model": "smollm2", "prompt": "hi", "max_tokens": 2, "seed": 5, "echo": True})
    answer = response.json()
    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("created") > 0
    assert answer == {
        "object": "text_completion",
        "model": "smollm2",
        "choices": [
            {"index": 0, "text": "hiw0 w1 ", "logprobs": None, "finish_reason": "length", "matched_stop": None}
        ],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 2,
            "total_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }
    assert engine.requests[0].sampling.seed == 5


def test_completion_of_a_batch_counts_each_prompt_once() -> None:
    response, engine = completions({"prompt": [[1], [2]], "max_tokens": 1, "n": 2})
    answer = response.json()
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (14, 4)
    assert [r.input_ids for r in engine.requests] == [[1], [1], [2], [2]]
    assert len({r.sampling.seed for r in engine.requests}) == 4


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_prompt_logprobs_as_lm_eval_asks_for_them(max_tokens: int) -> None:
    response, engine = completions({"prompt": [50, 51], "max_tokens": max_tokens, "logprobs": 1, "echo": True})
    assert engine.requests[0].logprobs == LogprobOptions(start_len=0, top_num=1)
    assert engine.requests[0].input_ids == [50, 51]
    logprobs = response.json()["choices"][0]["logprobs"]
    assert response.json()["choices"][0]["text"] == ["p0 p1 ", "p0 p1 w0 "][max_tokens]
    assert logprobs["tokens"] == ["p0 ", "p1 ", "w0 "][: 2 + max_tokens]
    assert logprobs["token_logprobs"] == [None, -2.0, -0.5][: 2 + max_tokens]
    assert logprobs["top_logprobs"][:2] == [None, {"t0": -1.5, "p1 ": -2.0}]
    assert logprobs["text_offset"] == [0, 3, 6][: 2 + max_tokens]


def test_completion_stream_carries_deltas_and_usage_when_asked() -> None:
    body = {"prompt": "hi", "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}, "logprobs": 0}
    chunks = events(completions(body)[0])
    *deltas, last = chunks
    assert "".join(c["choices"][0]["text"] for c in deltas) == "w0 w1 w2 "
    assert [t for c in deltas for t in c["choices"][0]["logprobs"]["tokens"]] == ["w0 ", "w1 ", "w2 "]
    assert [o for c in deltas for o in c["choices"][0]["logprobs"]["text_offset"]] == [0, 3, 6]
    assert deltas[-1]["choices"][0]["finish_reason"] == "length"
    assert all(c["usage"] is None for c in deltas)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)


def test_completion_stream_echoes_once() -> None:
    chunks = events(completions({"prompt": "hi:", "max_tokens": 3, "stream": True, "echo": True})[0])
    assert "".join(c["choices"][0]["text"] for c in chunks) == "hi:w0 w1 w2 "
    assert "usage" not in chunks[0]


def test_extensions_reach_the_engine() -> None:
    extensions = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "min_tokens": 1,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "stop_token_ids": [3],
        "stop": "x",
        "rid": "r",
        "bootstrap_host": "::1",
        "bootstrap_port": 9,
        "bootstrap_room": 8,
        "temperature": 1e-9,
    }
    _, engine = completions({"prompt": "a", "max_tokens": 2, **extensions})
    [request] = engine.requests
    sampling = request.sampling
    assert (request.rid, request.bootstrap) == ("r", Bootstrap("::1", 9, 8))
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty, sampling.min_new_tokens) == (5, 0.1, 1.1, 1)
    assert (sampling.ignore_eos, sampling.skip_special_tokens, sampling.stop_token_ids) == (True, False, (3,))
    assert (sampling.stop, sampling.temperature) == (("x",), 0.0)


def test_chat() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    body = {"messages": messages, "max_completion_tokens": 1, "logprobs": True, "top_logprobs": 1}
    response, engine = post("/v1/chat/completions", body)
    answer = response.json()
    assert answer["object"] == "chat.completion"
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "w0 "}
    assert choice["logprobs"]["content"] == [
        {
            "token": "w0 ",
            "logprob": -0.5,
            "bytes": list(b"w0 "),
            "top_logprobs": [{"token": "t0", "logprob": -1.5, "bytes": list(b"t0")}],
        }
    ]
    assert engine.requests[0].chat is not None
    assert engine.requests[0].chat.messages == [ChatMessage("system", "be brief"), ChatMessage("user", ["a", "b"])]


def test_chat_stream_opens_each_choice_with_its_role() -> None:
    chunks = events(post("/v1/chat/completions", {**CHAT, "stream": True, "n": 2})[0])
    for index in (0, 1):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in mine) == "w0 w1 "
        assert [c["finish_reason"] for c in mine][-1] == "length"
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}


def test_tokens_without_text_make_no_chunk() -> None:
    async def run(engine: FakeEngine) -> httpx.Response:
        task = asyncio.create_task(engine.post("/v1/chat/completions", {**CHAT, "stream": True}))
        await engine.wait_for(lambda: len(engine.requests) == 1)
        [request] = engine.requests
        for text, token in (("", 1), ("é", 2)):
            engine.client.dispatch([TextBatch([engine.text(request, text, [token])])])
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        engine.client.dispatch([TextBatch([engine.text(request, "", [3], FinishType.STOP, matched="s")])])
        return await task

    choices = [c["choices"][0] for c in events(with_engine(run, hold=True))]
    assert [c["delta"] for c in choices] == [{"role": "assistant", "content": ""}, {"content": "é"}, {}]
    assert (choices[-1]["finish_reason"], choices[-1]["matched_stop"]) == ("stop", "s")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_model_may_have_ollamas_tag(path: str) -> None:
    body = {**CHAT, "input": "Hi!", "max_tokens": 1, "model": "tiny:latest"}
    assert post(path, body, served_model_name="tiny", unknown_fields="ignore")[0].status_code == 200


def test_a_model_not_served_is_404() -> None:
    response, _ = post("/v1/chat/completions", {**CHAT, "model": "gpt"}, served_model_name="tiny")
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (404, "model", "model_not_found")
    assert '"tiny" is' in error["message"]


def test_the_engines_fields_go_by_the_clients_names() -> None:
    async def run(engine: FakeEngine) -> list[dict[str, Any]]:
        engine.errors = [ReqError("", 400, "no tokens", field="text"), ReqError("", 400, "bad turn", field="messages")]
        bodies = [("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", CHAT)]
        return [(await engine.post(*request)).json()["error"] for request in bodies]

    errors = with_engine(run)
    assert [(e["param"], e["message"]) for e in errors] == [
        ("prompt", "prompt: no tokens"),
        ("messages", "messages: bad turn"),
    ]


def test_models() -> None:
    async def run(engine: FakeEngine) -> None:
        [card] = (await engine.get("/v1/models")).json()["data"]
        assert (card["id"], card["max_model_len"]) == ("org/tiny", 512)
        assert (await engine.get("/v1/models/org/tiny")).json() == card
        assert (await engine.get("/v1/models/other")).status_code == 404

    with_engine(run, served_model_name="org/tiny", context_length=512)
