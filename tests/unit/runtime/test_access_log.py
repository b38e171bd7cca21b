"""Request ids and the access log, through the real app."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from contextlib import nullcontext

import httpx
import pytest
from starlette.types import Receive, Scope, Send
from support.fake_engine import FakeEngine, with_engine

from pdserve.messages.outputs import FinishType, TextBatch
from pdserve.runtime.logs import REQUEST_ID, JsonFormatter
from pdserve.runtime.refusal_log import LINES
from pdserve.runtime.web.access_log import AccessCounts, AccessLog, AccessRecord
from pdserve.runtime.web.apis import PATHS
from pdserve.runtime.web.paths import PathTable
from pdserve.server.http.parsing import MAX_BODY_BYTES

ACCESS = "pdserve.access"
ONE = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == ACCESS]


def test_an_id_is_taken_names_the_request_and_comes_back() -> None:
    async def run(engine: FakeEngine) -> None:
        async with engine.http(**{"x-request-id": "trace-1"}) as client:
            native = await client.post("/generate", json=ONE)
            chat = await client.post("/v1/chat/completions", json=CHAT)
            named = await client.post("/generate", json={**ONE, "rid": "mine"})
            batch = await client.post("/generate", json={**ONE, "text": ["a", "b"]})
        assert native.json()["meta_info"]["id"] == "trace-1"
        assert chat.json()["id"] == "chatcmpl-trace-1"
        assert named.json()["meta_info"]["id"] == "mine"
        assert [answer["meta_info"]["id"] for answer in batch.json()] == ["trace-1-0", "trace-1-1"]
        assert [answer.headers["x-request-id"] for answer in (native, chat, named, batch)] == ["trace-1"] * 4
        # What all other processes know of them.
        names = ["trace-1", "chatcmpl-trace-1", "mine", "trace-1-0", "trace-1-1"]
        assert [request.rid for request in engine.requests] == names

    with_engine(run)


def test_without_an_id_of_the_clients_the_answers_own_is_in_the_header() -> None:
    async def run(engine: FakeEngine) -> None:
        chat = await engine.post("/v1/chat/completions", CHAT)
        assert chat.headers["x-request-id"] == chat.json()["id"]
        named = await engine.post("/generate", {**ONE, "rid": "mine"})
        assert named.headers["x-request-id"] == "mine"
        foreign = await engine.post("/generate", {**ONE, "rid": "né"})
        assert foreign.headers["x-request-id"].isascii()

    with_engine(run)


@pytest.mark.parametrize("unfit", ["", "a b", "x" * 129, "é".encode(), b"\xff"])
def test_an_id_that_is_unfit_is_replaced(unfit: str | bytes) -> None:
    async def run(engine: FakeEngine) -> None:
        async with engine.http(**{"x-request-id": unfit}) as client:
            answer = await client.post("/generate", json=ONE)
        assert len(answer.headers["x-request-id"]) == 32
        assert answer.headers["x-request-id"] == answer.json()["meta_info"]["id"]

    with_engine(run)


def test_every_error_has_the_id() -> None:
    async def run(engine: FakeEngine) -> None:
        async with engine.http(**{"x-request-id": "abc"}) as client:
            answers = [
                await client.post("/generate", json={"txt": "a"}),
                await client.get("/nowhere"),
                await client.get("/generate"),
                await client.post("/generate", content=b" " * (MAX_BODY_BYTES + 1)),
            ]
            engine.client.close("gone")
            answers.append(await client.post("/generate", json=ONE))
        assert [answer.status_code for answer in answers] == [400, 404, 405, 413, 503]
        assert {answer.headers["x-request-id"] for answer in answers} == {"abc"}

    with_engine(run)
    with_engine(keyless, api_key="secret")


async def keyless(engine: FakeEngine) -> None:
    async with engine.http(**{"x-request-id": "abc"}) as client:
        answer = await client.post("/generate", json=ONE)
    assert (answer.status_code, answer.headers["x-request-id"]) == (401, "abc")


def test_a_fault_of_ours_has_the_id_too() -> None:
    async def run(engine: FakeEngine) -> None:
        engine.client.submit = None  # type: ignore[assignment,method-assign]
        transport = httpx.ASGITransport(app=engine.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answer = await client.post("/generate", json=ONE, headers={"x-request-id": "abc"})
        assert (answer.status_code, answer.headers["x-request-id"]) == (500, "abc")

    with_engine(run)


@pytest.mark.parametrize("fails", [False, True])
def test_lines_of_the_task_are_about_its_request_a_traceback_at_its_end_too(fails: bool) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert REQUEST_ID.get() == AccessRecord.of(scope).request_id == "abc"
        if fails:
            raise RuntimeError("a bug")

    async def run() -> AccessCounts:
        counts = AccessCounts()
        scope = {"type": "http", "method": "BREW", "path": "/made/up", "headers": [(b"x-request-id", b"abc")]}
        log = AccessLog(app, PathTable(PATHS), counts, access_log=True)
        with pytest.raises(RuntimeError) if fails else nullcontext():
            await log(scope, None, None)  # type: ignore[arg-type]
        assert REQUEST_ID.get() == ("abc" if fails else "")
        return counts

    counts = asyncio.run(run())
    # What strangers make up is no time series of its own.
    assert (dict(counts.responses), counts.in_flight) == ({("other", "other", 499): 1}, 0)


def test_one_id_twice_at_once_fails_neither() -> None:
    async def run(engine: FakeEngine) -> None:
        async with engine.http(**{"x-request-id": "abc"}) as client:
            bodies = [ONE, ONE, {**ONE, "text": ["a", "b"]}, {**ONE, "text": ["a", "b"]}]
            asked = [asyncio.create_task(client.post("/generate", json=body)) for body in bodies]
            await engine.wait_for(lambda: len(engine.requests) == 6)
            assert len({request.rid for request in engine.requests}) == 6
            assert all(request.rid.startswith("abc") for request in engine.requests)
            for request in engine.requests:
                engine.client.dispatch([TextBatch([engine.text(request, "x", [1], FinishType.LENGTH)])])
            answers = await asyncio.gather(*asked)
            # A name that the body gives is its client's to keep apart.
            engine.hold = False
            twice = [client.post("/generate", json={**ONE, "rid": "mine"}) for _ in range(2)]
            named = await asyncio.gather(*twice)
        assert [answer.status_code for answer in answers] == [200] * 4
        assert {answer.headers["x-request-id"] for answer in answers} == {"abc"}
        assert sorted(answer.status_code for answer in named) == [200, 400]

    with_engine(run, hold=True)


def test_the_access_log_has_a_line_a_request(caplog: pytest.LogCaptureFixture) -> None:
    async def run(engine: FakeEngine) -> None:
        body = {"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 3}, "rid": "mine"}
        async with engine.http(**{"x-request-id": "abc"}) as client:
            await client.post("/generate", json=body)
        await engine.post("/generate", {"txt": "a"})

    with caplog.at_level(logging.INFO, ACCESS):
        with_engine(run)
    streamed, refused = lines(caplog)
    message = streamed.getMessage()
    assert message.startswith('127.0.0.1:123 "POST /generate" 200 ')
    # A fake engine's first token may be there in less than 0.1 ms.
    end = r" prompt=7 cached=4 output=3 ttft=0\.\d{3} finish=length x-request-id=abc$"
    assert re.search(end, message)
    assert streamed.rid == "mine"  # type: ignore[attr-defined]
    assert " 400 0." in refused.getMessage()
    assert "prompt=" not in refused.getMessage()
    entry = json.loads(JsonFormatter("decode:1 http").format(streamed))
    logged = {
        key: entry[key] for key in ("rid", "request_id", "method", "path", "status", "prompt", "output", "finish")
    }
    assert list(logged.values()) == ["mine", "abc", "POST", "/generate", 200, 7, 3, "length"]
    assert 0 < entry["ttft"] <= entry["seconds"]
    assert entry["bytes"] > 100


def test_a_client_that_leaves_has_a_line_and_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    async def run(engine: FakeEngine) -> None:
        async def receive() -> dict:
            if not engine.requests:
                return {"type": "http.request", "body": b'{"text": "a", "stream": true}', "more_body": False}
            return {"type": "http.disconnect"}

        async def send(message: dict) -> None:
            raise AssertionError("nobody is left to answer")

        scope = {"type": "http", "method": "POST", "path": "/generate", "headers": [], "query_string": b""}
        await engine.app(scope, receive, send)  # type: ignore[arg-type]

    with caplog.at_level(logging.INFO, ACCESS):
        with_engine(run, hold=True)
    [line] = lines(caplog)
    assert '"POST /generate" 499 ' in line.getMessage()
    assert "finish=client_gone" in line.getMessage()


def test_a_leg_that_was_handed_over_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async def run(engine: FakeEngine) -> None:
        await engine.post("/generate", {**ONE, "bootstrap_host": "h", "bootstrap_room": 3})
        await engine.post("/generate", ONE)

    with caplog.at_level(logging.INFO, ACCESS):
        with_engine(run, disaggregation_mode="prefill")
    assert [record.fields["finish"] for record in lines(caplog)] == ["handed_over", "length"]  # type: ignore[attr-defined]


def test_polls_are_in_a_debug_log_only(caplog: pytest.LogCaptureFixture) -> None:
    async def run(engine: FakeEngine) -> None:
        for path in ("/health", "/metrics", "/v1/models"):
            assert (await engine.get(path)).status_code == 200

    with caplog.at_level(logging.DEBUG, ACCESS):
        with_engine(run)
    assert [record.levelname for record in lines(caplog)] == ["DEBUG", "DEBUG", "INFO"]


def test_the_access_log_can_be_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    async def run(engine: FakeEngine) -> None:
        await engine.post("/generate", ONE)

    with caplog.at_level(logging.DEBUG, ACCESS):
        with_engine(run, disable_access_log=True)
    assert lines(caplog) == []


def test_preflights_can_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    asks = {"origin": "https://chat.example.org", "access-control-request-method": "POST"}

    async def run(engine: FakeEngine) -> None:
        async with engine.http() as client:
            for _ in range(2 * LINES):
                assert (await client.options("/generate", headers=asks)).status_code == 200
                assert (await client.options("/moved")).status_code == 204

    with caplog.at_level(logging.INFO, ACCESS):
        with_engine(run, api_key="secret", allowed_origins="https://chat.example.org")
    assert len(lines(caplog)) == LINES


def test_a_client_without_a_key_can_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def run(engine: FakeEngine) -> None:
        async with engine.http() as client:
            for _ in range(3 * LINES):
                assert (await client.get("/v1/models/a%0Ab")).status_code == 401
        async with engine.http(authorization="Bearer secret") as client:
            await client.get("/v1/models")

    with caplog.at_level(logging.INFO, ACCESS):
        with_engine(run, api_key="secret")
    assert len(lines(caplog)) == LINES + 1
    assert all("\n" not in record.getMessage() for record in lines(caplog))
