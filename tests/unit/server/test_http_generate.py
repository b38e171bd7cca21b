"""``POST /generate`` through the real app, in front of a fake engine."""

from __future__ import annotations

import asyncio
import itertools
import re
from typing import Any

import httpx
import pytest
from support.fake_engine import FakeEngine, events, with_engine

from pdserve.messages.outputs import CachedBeyond, FinishType, HeldTokens, ReqError, ReqMeta, TextBatch, Timing
from pdserve.messages.requests import Bootstrap, LogprobOptions
from pdserve.server.http.native.answers import CachedTokensDetails
from pdserve.server.http.native.generate import by_tier


def generate(body: dict[str, Any], **options: Any) -> tuple[httpx.Response, FakeEngine]:
    async def run(engine: FakeEngine) -> tuple[httpx.Response, FakeEngine]:
        return await engine.post("/generate", body), engine

    return with_engine(run, **options)


def test_one_prompt_gets_one_object() -> None:
    response, engine = generate({"text": "hi", "sampling_params": {"max_new_tokens": 3, "temperature": 0}, "rid": "r"})
    answer = response.json()
    latency = answer["meta_info"].pop("e2e_latency")
    assert 0 < latency < 10
    reported = answer["meta_info"]["timing"]
    total, reply, phases = (reported.pop(name) for name in ("total_ms", "reply_ms", "phases"))
    assert total == pytest.approx(max(latency * 1000, 1.235), abs=2e-3)
    assert total == pytest.approx(1.235 + reply, abs=2e-3)
    assert [one["phase"] for one in phases] == ["queue", "reply"]
    assert answer == {
        "text": "w0 w1 w2 ",
        "output_ids": [0, 1, 2],
        "meta_info": {
            "id": "r",
            "finish_reason": {"type": "length", "length": 3},
            "prompt_tokens": 7,
            "completion_tokens": 3,
            "cached_tokens": 4,
            "retractions": 0,
            "timing": {
                "first_token_ms": 1.235,
                "tokenize_ms": 0,
                "queue_ms": 1.235,
                "prefill_ms": 0,
                "transfer_ms": 0,
                "transfer_bytes": 4096,
                "decode_ms": 0,
                "detokenize_ms": 0,
            },
        },
    }
    [request] = engine.requests
    assert (request.rid, request.text, request.input_ids, request.logprobs) == ("r", "hi", None, None)
    assert len(engine.client.live) == 0


def test_cached_tokens_are_reported_by_tier_and_what_a_decode_had_itself_beside_them() -> None:
    meta = ReqMeta(40, 1, 30, Timing(), cached_beyond=CachedBeyond(host=8, store=12))
    reported = {"device": 10, "host": 8, "storage": 12}
    assert by_tier(meta) == reported
    meta.held = HeldTokens(device=4, host=0, store=16)
    assert by_tier(meta) == reported | {"decode": {"device": 4, "host": 0, "storage": 16}}
    CachedTokensDetails.model_validate(by_tier(meta))


def test_batch_with_n_is_a_flat_list_with_seeds_and_rooms_of_their_own() -> None:
    body = {
        "input_ids": [[1, 2], [3]],
        "sampling_params": {"max_new_tokens": 1, "n": 2, "sampling_seed": 2**63 - 1},
        "rid": ["a", "b"],
        "bootstrap_host": "10.0.0.1",
        "bootstrap_room": 2**63 - 2,
    }
    response, engine = generate(body)
    assert [answer["meta_info"]["id"] for answer in response.json()] == ["a-0", "a-1", "b-0", "b-1"]
    assert [r.input_ids for r in engine.requests] == [[1, 2], [1, 2], [3], [3]]
    assert [r.sampling.seed for r in engine.requests] == [2**63 - 1, 0, 2**63 - 1, 0]
    named = [r.bootstrap for r in engine.requests]
    assert [(b.host, b.port, b.room) for b in named] == [
        ("10.0.0.1", 8998, room) for room in (2**63 - 2, 2**63 - 1, 0, 1)
    ]
    assert all("without a cluster secret" in b.refusal for b in named)


def test_lists_of_rooms_as_sglangs_router_sends_them() -> None:
    body = {
        "text": ["x", "y"],
        "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 2}],
        "bootstrap_host": ["localhost", "127.0.0.1"],
        "bootstrap_port": [9000, None],
        "bootstrap_room": [5, 9],
    }
    response, engine = generate(body)
    assert [r.bootstrap for r in engine.requests] == [
        Bootstrap("localhost", 9000, 5),
        Bootstrap("127.0.0.1", 8998, 9),
    ]
    assert [len(answer["output_ids"]) for answer in response.json()] == [1, 2]


def test_a_batch_of_one_is_a_list_and_draws_ids_and_seeds() -> None:
    response, engine = generate({"text": ["x"], "sampling_params": {"max_new_tokens": 1}})
    [answer] = response.json()
    assert re.fullmatch(r"[0-9a-f]{32}-0", answer["meta_info"]["id"])
    assert engine.requests[0].sampling.seed > 0


def test_stream_is_cumulative_and_ends_with_done() -> None:
    response, _ = generate({"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 3}, "stream": True})
    chunks = events(response)
    assert [c["text"] for c in chunks][-1] == "w0 w1 w2 "
    for before, after in itertools.pairwise(chunks):
        assert after["text"].startswith(before["text"])
        assert after["meta_info"]["completion_tokens"] == len(after["output_ids"]) > len(before["output_ids"])
    assert [c["meta_info"]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[0]["meta_info"]["prompt_tokens"] == 2
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    assert "index" not in chunks[0]


def test_streamed_batch_says_which() -> None:
    response, _ = generate({"text": ["a", "b"], "sampling_params": {"max_new_tokens": 2}, "stream": True})
    last = {c["index"]: c["text"] for c in events(response)}
    assert last == {0: "w0 w1 ", 1: "w0 w1 "}


def test_logprobs() -> None:
    body = {
        "text": "hi",
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 1,
    }
    response, engine = generate(body)
    assert engine.requests[0].logprobs == LogprobOptions(start_len=0, top_num=1)
    meta = response.json()["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 50, None], [-2.0, 51, None]]
    assert meta["output_token_logprobs"] == [[-0.5, 0, None]]
    assert meta["input_top_logprobs"] == [None, [[-1.5, 90, None]]]
    assert meta["output_top_logprobs"] == [[[-1.5, 90, None]]]


def test_no_new_tokens_means_none_in_the_answer() -> None:
    response, engine = generate({"text": "hi", "sampling_params": {"max_new_tokens": 0}})
    assert engine.requests[0].sampling.max_new_tokens == 1
    answer = response.json()
    assert (answer["text"], answer["output_ids"], answer["meta_info"]["completion_tokens"]) == ("", [], 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "seen", "retry"),
    [(400, 400, None), (429, 429, "1"), (503, 503, "1"), (502, 502, None), (200, 500, None)],
)
def test_an_error_before_any_text_is_the_status(stream: bool, status: int, seen: int, retry: str | None) -> None:
    async def run(engine: FakeEngine) -> httpx.Response:
        engine.errors = [ReqError("", status, "too long", field="stop")]
        return await engine.post("/generate", {"text": ["ok", "hi"], "stream": stream})

    response = with_engine(run)
    assert (response.status_code, response.headers.get("retry-after")) == (seen, retry)
    error = response.json()["error"]
    assert (error["status"], error["param"]) == (seen, "sampling_params.stop")
    assert error["code"] == ("rate_limit_exceeded" if seen == 429 else None)
    assert error["message"] == "sampling_params.stop: prompt 0 of the batch: too long"


def test_an_error_after_text_is_an_event_and_ends_the_rest() -> None:
    async def run(engine: FakeEngine) -> tuple[httpx.Response, FakeEngine]:
        task = asyncio.create_task(engine.post("/generate", {"text": ["a", "b"], "stream": True, "rid": ["x", "y"]}))
        await engine.wait_for(lambda: len(engine.requests) == 2)
        engine.client.dispatch([TextBatch([engine.text(engine.requests[0], "w0 ", [0])])])
        await asyncio.sleep(0)
        engine.client.dispatch([ReqError("y", 502, "the peer died", "server_error")])
        return await task, engine

    response, engine = with_engine(run, hold=True)
    chunks = events(response)
    assert response.status_code == 200
    assert chunks[0]["text"] == "w0 "
    assert chunks[-1]["error"] == {
        "message": "prompt 1 of the batch: the peer died",
        "type": "server_error",
        "code": None,
        "param": None,
        "status": 502,
    }
    assert [abort.rid for abort in engine.aborts] == ["x"]


def test_unread_tokens_come_as_one_chunk() -> None:
    async def run(engine: FakeEngine) -> httpx.Response:
        task = asyncio.create_task(engine.post("/generate", {"text": "a", "stream": True}))
        await engine.wait_for(lambda: len(engine.requests) == 1)
        [request] = engine.requests
        for i in range(5):
            engine.client.dispatch([TextBatch([engine.text(request, f"w{i} ", [i])])])
        engine.client.dispatch([TextBatch([engine.text(request, "", [9], FinishType.STOP, matched=9)])])
        return await task

    [chunk] = events(with_engine(run, hold=True))
    assert chunk["output_ids"] == [0, 1, 2, 3, 4, 9]
    assert chunk["meta_info"]["finish_reason"] == {"type": "stop", "matched": 9}


@pytest.mark.parametrize("name", ["r", "r-1"])
def test_abort_by_name_answers_what_there_is(name: str) -> None:
    async def run(engine: FakeEngine) -> tuple[httpx.Response, FakeEngine]:
        body = {"text": ["a", "b"], "rid": "r"}
        task = asyncio.create_task(engine.post("/generate", body))
        await engine.wait_for(lambda: len(engine.requests) == 2)
        engine.client.dispatch([TextBatch([engine.text(engine.requests[1], "w0 ", [0])])])
        aborted = await engine.post("/abort_request", {"rid": name})
        assert aborted.json() == {"aborted": 2 if name == "r" else 1, "legs": 0}
        await engine.post("/abort_request", {"abort_all": True})
        return await task, engine

    response, engine = with_engine(run, hold=True)
    assert response.status_code == 200
    assert response.json()[1]["text"] == "w0 "
    assert response.json()[1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert engine.aborts[0].rid == ("r-0" if name == "r" else "r-1")


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    async def run(engine: FakeEngine) -> None:
        body = {"text": "a", "rid": "r", "sampling_params": {"max_new_tokens": 1}}
        task = asyncio.create_task(engine.post("/generate", body))
        await engine.wait_for(lambda: len(engine.requests) == 1)
        second = await engine.post("/generate", body)
        assert (second.status_code, second.json()["error"]["param"]) == (400, "rid")
        assert len(engine.requests) == 1
        engine.step(engine.requests[0], 0)
        assert (await task).status_code == 200
        engine.hold = False
        assert (await engine.post("/generate", body)).status_code == 200

    with_engine(run, hold=True)


def test_after_close_everything_is_503() -> None:
    async def run(engine: FakeEngine) -> None:
        task = asyncio.create_task(engine.post("/generate", {"text": "a"}))
        await engine.wait_for(lambda: len(engine.requests) == 1)
        engine.client.close("going down")
        for response in (await task, await engine.post("/generate", {"text": "a"}), await engine.get("/health")):
            assert (response.status_code, response.json()["error"]["message"]) == (503, "going down")

    with_engine(run, hold=True)


@pytest.mark.parametrize(("field", "prompt"), [("text", "a long one"), ("input_ids", [1, 2])])
def test_what_the_scheduler_says_of_a_prompt_names_the_field_that_was_sent(field: str, prompt: Any) -> None:
    async def run(engine: FakeEngine) -> None:
        engine.errors = [ReqError("", 400, "the prompt has 9 tokens, the KV pool holds 8", field="input_ids")] * 2
        for stream in (False, True):
            error = (await engine.post("/generate", {field: prompt, "stream": stream})).json()["error"]
            assert (error["param"], error["message"].split(":")[0]) == (field, field)

    with_engine(run)


def test_a_deadline_is_no_reason_to_send_the_same_again() -> None:
    async def run(engine: FakeEngine) -> None:
        for status, reported in ((408, "false"), (503, None)):
            engine.errors = [ReqError("", status, "too late")]
            answer = await engine.post("/v1/completions", {"prompt": "a"})
            assert (answer.status_code, answer.headers.get("x-should-retry")) == (status, reported)

    with_engine(run)


@pytest.mark.parametrize(("prompts", "n"), [(["a"] * 4, 1), ("a", 4), (["a", "b"], 2)])
def test_a_batch_that_can_never_be_taken_in_is_refused_before_any_of_it_is(prompts, n) -> None:
    async def run(engine: FakeEngine) -> None:
        answer = await engine.post("/generate", {"text": prompts, "sampling_params": {"n": n}})
        assert answer.status_code == 413
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("batch_too_large", "request_too_large")
        assert "retry-after" not in answer.headers
        assert engine.requests == []
        assert (await engine.post("/generate", {"text": ["a"] * 3})).status_code == 200

    with_engine(run, max_queued_requests=2, max_running_requests=1)
