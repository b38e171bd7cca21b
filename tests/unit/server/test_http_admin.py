"""Questions and orders, keys, and the shape of every error, through the real app in front of a fake engine."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_engine import FakeEngine, with_engine

from pdserve.messages.base import Message, pack_i32
from pdserve.messages.control import Ping, Pong
from pdserve.messages.kv_debug import HashedGroup, KVHashes, KVHashesReq
from pdserve.messages.memory import MemoryReq, MemoryResult
from pdserve.messages.outputs import ReqError
from pdserve.messages.question import Question, RefusedAnswer, TextQuestion
from pdserve.runtime.web.errors import error_type
from pdserve.server.http.admin.kv_hashes import KVHashesAnswer
from pdserve.server.http.admin.memory import MemoryReleased, MemoryResumed
from pdserve.server.http.engine import health_check as health_module
from pdserve.server.http.pages import openapi as openapi_module
from pdserve.server.http.pages.docs_page import render
from pdserve.server.http.parsing import MAX_BODY_BYTES
from pdserve.server.http.status.info import TransfersAnswer


def test_health_asks_once_for_all_who_ask_at_once() -> None:
    async def run(engine: FakeEngine) -> None:
        answers = await asyncio.gather(*(engine.get("/health") for _ in range(20)))
        assert {answer.status_code for answer in answers} == {200}
        assert [type(question) for question in engine.questions] == [Ping]

    with_engine(run)


def test_health_says_why_not() -> None:
    async def run(engine: FakeEngine) -> None:
        engine.pong = Pong(False, "the model is still loading")
        answer = await engine.get("/health")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["message"] == "the model is still loading"

    with_engine(run)


def test_health_without_an_answer_is_503_and_a_late_answer_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_module, "SILENT_SECONDS", 0.01)

    async def run(engine: FakeEngine) -> None:
        answer = await engine.get("/health")
        assert answer.status_code == 503
        assert "no answer" in answer.json()["error"]["message"]
        [ping] = engine.questions
        assert isinstance(ping, Ping)
        engine.client.dispatch([Pong(True, id=ping.id)])

    with_engine(run, mute=True)


def test_a_ring_that_is_busy_is_what_it_was_when_it_answered_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_module, "QUICK_SECONDS", 0.01)
    monkeypatch.setattr(health_module, "CACHE_SECONDS", 0.0)

    async def run(engine: FakeEngine) -> None:
        engine.mute = True
        answer = await engine.get("/health")
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, "no process has answered yet")
        [first] = engine.questions
        assert isinstance(first, Ping)
        engine.client.dispatch([Pong(True, id=first.id)])
        for _ in range(3):
            assert (await engine.get("/readyz")).status_code == 200
        # All of them waited for one and the same ping.
        [_, second] = engine.questions
        assert isinstance(second, Ping)
        engine.client.dispatch([Pong(False, "stuck", id=second.id)])
        engine.mute = False
        engine.pong = Pong(False, "stuck")
        assert (await engine.get("/health")).status_code == 503

    with_engine(run)


def test_this_process_alone_is_alive_whatever_the_others_say() -> None:
    async def run(engine: FakeEngine) -> None:
        assert (await engine.get("/livez")).json() == {"status": "alive"}
        assert engine.questions == []

    with_engine(run, mute=True)


def test_health_is_asked_again_once_the_answer_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_module, "CACHE_SECONDS", 0.0)

    async def run(engine: FakeEngine) -> None:
        assert (await engine.get("/health")).status_code == 200
        engine.pong = Pong(False, "draining")
        assert (await engine.get("/health")).status_code == 503

    with_engine(run)


def test_health_generate_makes_a_token() -> None:
    async def run(engine: FakeEngine) -> None:
        assert (await engine.get("/health_generate")).status_code == 200
        [request] = engine.requests
        assert (request.sampling.max_new_tokens, request.sampling.temperature) == (1, 0.0)
        engine.errors = [ReqError("", 503, "full")]
        assert (await engine.get("/health_generate")).status_code == 503

    with_engine(run)


@pytest.mark.parametrize(
    ("path", "body", "asked"),
    [
        ("release", {}, MemoryReq(True)),
        ("release", {"tags": None, "wait_s": 2.5}, MemoryReq(True, [], 2.5)),
        ("resume", {"tags": ["weights"]}, MemoryReq(False, ["weights"])),
    ],
)
def test_memory_is_given_back_and_taken(path: str, body: dict[str, Any], asked: MemoryReq) -> None:
    async def run(engine: FakeEngine) -> None:
        for status, result in (
            (200, MemoryResult(["weights"], 5, 0.25)),
            (409, RefusedAnswer(409, "2 requests are running")),
        ):
            answer = asyncio.create_task(engine.post(f"/{path}_memory_occupation", body))
            await engine.wait_for(lambda: bool(engine.questions))
            question = engine.questions.pop()
            assert isinstance(question, MemoryReq)
            assert msgspec.structs.replace(question, id=0) == asked
            engine.client.dispatch([msgspec.structs.replace(result, id=question.id)])
            response = await answer
            assert response.status_code == status
            if status == 200:
                (MemoryReleased if path == "release" else MemoryResumed).model_validate(response.json())
        assert response.json()["error"]["message"] == "2 requests are running"

    with_engine(run, mute=True)


@pytest.mark.parametrize("path", ["release", "resume"])
def test_without_a_body_all_memory_is_meant(path: str) -> None:
    async def run(engine: FakeEngine) -> None:
        async with engine.http() as client:
            answer = asyncio.create_task(client.post(f"/{path}_memory_occupation"))
            await engine.wait_for(lambda: bool(engine.questions))
            [question] = engine.questions
            assert isinstance(question, MemoryReq)
            assert (question.release, question.tags, question.wait_s) == (path == "release", [], 0.0)
            engine.client.dispatch([MemoryResult([], 0, 0.0, id=question.id)])
            assert (await answer).status_code == 200
            page = (await client.get("/openapi.json")).json()["paths"]
        orders = [page[name]["post"]["requestBody"] for name in (f"/{path}_memory_occupation", "/role")]
        assert [order["required"] for order in orders] == [False, True]

    with_engine(run, mute=True)


def test_memory_of_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    async def run(engine: FakeEngine) -> None:
        for body in ({"tags": ["cuda_graph"]}, {"tags": "weights"}, {"wait_s": -1}):
            answer = await engine.post("/release_memory_occupation", body)
            assert answer.status_code == 400
        assert "kv_cache" in (await engine.post("/resume_memory_occupation", {"tags": ["kv"]})).text
        assert (await engine.post("/resume_memory_occupation", {"wait_s": 1})).status_code == 400
        assert engine.questions == []

    with_engine(run, mute=True)


def test_transfers_are_shown() -> None:
    async def run(engine: FakeEngine) -> None:
        assert (await engine.get("/transfers")).json() == {"open": 0, "transfers": []}
        room = {"direction": "sending", "room": 7, "state": "queued", "rid": None, "peer": "e", "seconds": 0.5}
        engine.transfers = [room | {"prompt_tokens": None, "reason": None}]
        answer = await engine.get("/transfers")
        TransfersAnswer.model_validate(answer.json())
        assert (answer.json()["open"], answer.json()["transfers"][0]["room"]) == (1, 7)

    with_engine(run)


def test_info_flush_and_the_old_names() -> None:
    async def run(engine: FakeEngine) -> None:
        for path in ("/server_info", "/get_server_info"):
            info = (await engine.get(path)).json()
            assert (info["role"], info["pool"], info["epoch"]) == ("unified", {"in_use": 0}, "e1")
            assert info["http"]["live_requests"] == 0
        assert (await engine.get("/get_model_info")).json()["model_path"] == "smollm2"
        assert (await engine.post("/flush_cache", {})).json() == {"success": True, "flushed": 5}
        engine.flush_result = RefusedAnswer(400, "3 requests are running")
        assert (await engine.post("/flush_cache", {})).status_code == 400
        assert (await engine.get("/flush_cache")).status_code == 405

    with_engine(run)


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/nope", 404), ("GET", "/generate", 405), ("POST", "/health", 405)]
)
def test_unknown_paths_and_methods_have_the_same_shape(method: str, path: str, status: int) -> None:
    async def run(engine: FakeEngine) -> None:
        async with engine.http() as client:
            answer = await client.request(method, path)
        assert answer.status_code == status
        assert answer.json()["error"].keys() == {"message", "type", "code", "param", "status"}
        assert path in answer.json()["error"]["message"]

    with_engine(run)


def test_api_key_guards_all_but_health() -> None:
    async def run(engine: FakeEngine) -> None:
        paths = ("/v1/models", "/server_info", "/health_generate", "/openapi.json", "/nope")
        for wrong in (b"", b"Bearer wrong", "Bearer sécret".encode(), b"secret"):
            async with engine.http(authorization=wrong) as client:
                assert (await client.get("/health")).status_code == 200
                for path in paths:
                    answer = await client.get(path)
                    assert (answer.status_code, answer.json()["error"]["type"]) == (401, "invalid_request_error")
                    assert answer.json()["error"]["code"] == "invalid_api_key"
        async with engine.http(authorization="Bearer secret") as client:
            assert [(await client.get(path)).status_code for path in paths] == [200, 200, 200, 200, 404]

    with_engine(run, api_key="secret")


def test_a_body_over_the_limit_is_413_however_it_comes() -> None:
    async def chunks() -> Any:
        for _ in range(MAX_BODY_BYTES // 2**20 + 1):
            yield b" " * 2**20

    async def run(engine: FakeEngine) -> None:
        async with engine.http() as client:
            declared = await client.post("/generate", content=b" " * (MAX_BODY_BYTES + 1))
            chunked = await client.post("/generate", content=chunks())
        assert [declared.status_code, chunked.status_code] == [413, 413]

    with_engine(run)


def test_documentation_lists_every_field() -> None:
    async def run(engine: FakeEngine) -> None:
        spec = (await engine.get("/openapi.json")).json()
        schema = spec["paths"]["/generate"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        fields = spec["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]["properties"]
        assert {"text", "input_ids", "sampling_params", "bootstrap_room"} <= fields.keys()

    with_engine(run)


def test_the_page_for_people_loads_nothing_and_shows_every_endpoint_and_field() -> None:
    async def run(engine: FakeEngine) -> None:
        answer, spec = await engine.get("/docs"), (await engine.get("/openapi.json")).json()
        assert answer.headers["content-type"].startswith("text/html")
        assert answer.headers["content-security-policy"].startswith("default-src 'none'; style-src 'unsafe-inline';")
        links = re.findall(r"""(?:href|src|url)[=(]["']?([^"')>]*)""", answer.text)
        assert links
        assert {link for link in links if not link.startswith("#")} == {"openapi.json"}
        assert "<script" not in answer.text
        for path in spec["paths"]:
            assert f"<code>{path}</code></h2>" in answer.text
        for name, schema in spec["components"]["schemas"].items():
            assert f'<h2 id="{name}">' in answer.text
            for field in schema.get("properties", {}):
                assert f"<td><code>{field}</code></td>" in answer.text
        assert {link[1:] for link in links if link.startswith("#")} <= set(re.findall(r'id="([^"]*)"', answer.text))
        for gone in ("/redoc", "/docs/oauth2-redirect"):
            assert (await engine.get(gone)).status_code == 404

    with_engine(run)


def test_the_pages_are_made_on_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    makers: list[threading.Thread] = []

    def make(*args: Any) -> dict[str, Any]:
        makers.append(threading.current_thread())
        return make_page(*args)

    make_page = openapi_module._list_paths
    monkeypatch.setattr(openapi_module, "_list_paths", make)
    for path in ("/openapi.json", "/docs"):
        assert with_engine(lambda engine, path=path: engine.get(path)).status_code == 200
    assert len(makers) == 2
    assert threading.main_thread() not in makers


def test_the_page_for_people_runs_nothing_that_a_schema_says() -> None:
    evil = "<script>alert(1)</script>"
    field = {"type": "string", "description": evil, "default": evil, "enum": [evil]}
    body = {"required": True, "content": {evil: {"schema": {"$ref": f"#/x/{evil}"}}}}
    answers = {"200": {"content": {"text/plain": {"schema": {"type": evil}}}}}
    operation = {"description": evil, "requestBody": body, "responses": answers}
    schemas = {evil: {"description": evil, "properties": {evil: field}}}
    page = {"info": {"title": evil, "version": evil}, "paths": {evil: {"get": operation}}}
    assert "<script" not in render({**page, "components": {"schemas": schemas}})


PATHS = st.sampled_from(["/generate", "/v1/completions", "/v1/chat/completions", "/abort_request", "/flush_cache"])
LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.sampled_from("ab ")
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3), max_leaves=4)
NAMES = ["text", "input_ids", "prompt", "messages", "n", "stream", "rid", "stop", "seed", "echo", "bootstrap_room"]
MESSAGES = st.fixed_dictionaries({"messages": st.just([{"role": "user", "content": "a"}])})
BODIES = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4) | MESSAGES


@given(PATHS, st.binary(max_size=30) | BODIES)
def test_no_body_makes_a_500(path: str, body: bytes | dict[str, Any]) -> None:
    async def run(engine: FakeEngine) -> None:
        content = body if isinstance(body, bytes) else orjson.dumps(body)
        async with engine.http() as client:
            answer = await client.post(path, content=content)
        assert answer.status_code < 500
        if answer.status_code != 200:
            assert answer.json()["error"]["message"]
        assert len(engine.client.live) == 0

    with_engine(run)


def test_hashes_of_what_is_cached_are_reported_by_layer_and_page() -> None:
    async def run(engine: FakeEngine) -> None:
        refused = await engine.post("/kv/hashes", {"text": "aaaa bb"})
        assert (refused.status_code, "--kv-debug" in refused.text) == (501, True)
        kept = np.arange(1, 9, dtype="<u8").tobytes()  # two pages of two layers, K and V
        windowed = np.array([0, 0, 10, 11], dtype="<u8").tobytes()  # the first page behind the window is gone
        groups = [HashedGroup((0, 2), ("K", "V"), kept), HashedGroup((1,), ("K", "V"), windowed)]
        groups.append(HashedGroup((), ("K", "V"), b""))  # its pages are mere numbers
        engine.kv_hashes = KVHashes(8, 4, "tenant", "tokens", groups)
        answer = (await engine.post("/kv/hashes", {"text": "aaaa bb", "extra_key": "tenant"})).json()
        KVHashesAnswer.model_validate(answer)
        assert engine.questions[-1] == KVHashesReq(pack_i32([4, 2]), "tenant", id=engine.questions[-1].id)
        layers = answer.pop("layers")
        assert answer == {
            **{"tokens": 2, "cached_tokens": 8, "page_size": 4},
            **{"order": "tokens", "extra_key": "tenant"},
        }
        assert layers[0] == {"layer": 0, "K": [f"{1:016x}", f"{5:016x}"], "V": [f"{2:016x}", f"{6:016x}"]}
        assert layers[1] == {"layer": 1, "K": [None, f"{10:016x}"], "V": [None, f"{11:016x}"]}
        assert layers[2] == {"layer": 2, "K": [f"{3:016x}", f"{7:016x}"], "V": [f"{4:016x}", f"{8:016x}"]}
        await engine.post("/kv/hashes", {"input_ids": [7, 8]})
        assert engine.questions[-1] == KVHashesReq(pack_i32([7, 8]), None, id=engine.questions[-1].id)
        for body, param in (({}, "text"), ({"text": "a", "input_ids": [1]}, "text"), ({"text": "bad"}, "text")):
            bad = await engine.post("/kv/hashes", body)
            assert (bad.status_code, bad.json()["error"]["param"]) == (400, param)

    with_engine(run)


LOADING = "the model is still loading"


class LoadingEngine(FakeEngine):
    """An instance that waits for its worker. Questions about text are answered all the same."""

    def _answer(self, question: Message) -> None:
        if isinstance(question, TextQuestion):
            super()._answer(question)
            return
        assert isinstance(question, Question)
        self._soon(RefusedAnswer(503, LOADING, id=question.id))


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/health", None, 503),
        ("POST", "/flush_cache", {}, 400),
        ("POST", "/role", {"role": "decode"}, 409),
        ("POST", "/release_memory_occupation", {}, 503),
        ("POST", "/resume_memory_occupation", {}, 503),
        ("POST", "/kv/resize", {"max_total_tokens": 64}, 503),
        ("POST", "/kv/hashes", {"text": "a"}, 503),
        ("POST", "/start_profile", {}, 503),
        ("POST", "/stop_profile", {}, 503),
    ],
)
def test_an_instance_that_still_loads_refuses_orders(method: str, path: str, body: Any, status: int) -> None:
    async def check() -> None:
        async with LoadingEngine().http() as client:
            answer = await client.request(method, path, json=body)
        error = {"message": LOADING, "type": error_type(status), "param": None, "code": None, "status": status}
        assert (answer.status_code, answer.json()) == (status, {"error": error})

    asyncio.run(check())


def test_an_instance_that_still_loads_says_so_and_has_no_hand_overs() -> None:
    async def check() -> None:
        async with LoadingEngine().http() as client:
            info, transfers = await client.get("/server_info"), await client.get("/transfers")
        assert (info.status_code, info.json()["status"], set(info.json())) == (
            200,
            "loading",
            {"status", "version", "epoch", "http"},
        )
        assert (transfers.status_code, transfers.json()) == (200, {"open": 0, "transfers": []})

    asyncio.run(check())
