"""Every kind of answer against its declared shape, which the OpenAPI page shows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from pydantic import BaseModel
from support.endpoints import ANSWERS, BODY_MODELS, QUESTIONS, STREAMS
from support.fake_engine import FakeEngine, events, with_engine

from pdserve.messages.control import Identity, Pace, Pong
from pdserve.messages.outputs import FinishReason, FinishType, ReqError, TextBatch
from pdserve.server.http.answers import ErrorAnswer, MetricsText
from pdserve.server.http.bodies.fields import Body, inner_bodies

LOGPROBS = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
NATIVE_LOGPROBS = {
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 1,
    "return_prompt_token_ids": True,
}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
POSTS: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 2}}),
    ("/generate", {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 2, "n": 2}, **NATIVE_LOGPROBS}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 2}),
    ("/v1/completions", {"prompt": [1], "n": 2, "echo": True, "logprobs": 2, "return_token_ids": True}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, **LOGPROBS, "n": 2}),
]
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {"prompt": "a b"}),
    ("/tokenize", {"prompt": ["a b", "c"], "return_token_strs": True}),
    ("/apply-template", {"messages": [{"role": "user", "content": "a"}]}),
    ("/detokenize", {"tokens": [1, 2]}),
    ("/detokenize", {"tokens": [[1], [2]]}),
    ("/abort_request", {"abort_all": True}),
]


def check(model: type[BaseModel], content: Any) -> None:
    """Strictly, as JSON: a number is no string, and nothing is left over."""
    model.model_validate_json(orjson.dumps(content), strict=True)


@pytest.mark.parametrize(("path", "body"), POSTS + OTHERS)
def test_plain_answers(path: str, body: dict[str, Any]) -> None:
    async def run(engine: FakeEngine) -> None:
        response = await engine.post(path, body)
        assert response.status_code == 200, response.text
        check(ANSWERS[path], response.json())

    with_engine(run)


@pytest.mark.parametrize("usage", [{}, {"include_usage": True}, {"continuous_usage_stats": True}])
@pytest.mark.parametrize(("path", "body"), POSTS)
def test_streamed_answers(path: str, body: dict[str, Any], usage: dict[str, bool]) -> None:
    async def run(engine: FakeEngine) -> None:
        options = {} if path == "/generate" else {"stream_options": usage}
        chunks = events(await engine.post(path, {**body, **options, "stream": True}))
        assert chunks
        for chunk in chunks:
            check(STREAMS[path], chunk)

    with_engine(run)


def test_health_is_declared_with_all_that_an_instance_reports() -> None:
    identity = Identity(epoch="e", role="decode", bootstrap_host="", bootstrap_port=8998)
    pace = Pace(token_ms=1.5, decode_ms=1.0, stream_ms=0.25, budget_ms=0.0, max_tokens=512)

    async def run(engine: FakeEngine) -> None:
        engine.pong = Pong(True, "the store fails", identity, pace)
        response = await engine.get("/health")
        check(QUESTIONS["/health"], response.json())
        assert response.text == (
            '{"status":"ready","epoch":"e","role":"decode","bootstrap_host":"","bootstrap_port":8998,'
            '"pace":{"token_ms":1.5,"decode_ms":1.0,"stream_ms":0.25,"budget_ms":0.0,"max_tokens":512},'
            '"warning":"the store fails"}'
        )

    with_engine(run)


def test_questions(tmp_path: Path) -> None:
    async def run(engine: FakeEngine) -> None:
        kept = (await engine.post("/v1/responses", {"input": "a", "max_output_tokens": 2})).json()["id"]
        for path, answer in QUESTIONS.items():
            response = await engine.get(path.replace("{name:path}", "smollm2").replace("{id:path}", kept))
            assert response.status_code == 200
            if answer is not MetricsText:
                check(answer, response.json())

    with_engine(run, kv_sessions_dir=str(tmp_path))


OPENAI_REASONS = {"stop", "length", "tool_calls", "content_filter"}
NATIVE: dict[FinishType, dict[str, Any]] = {
    FinishType.STOP: {"type": "stop", "matched": "x"},
    FinishType.LENGTH: {"type": "length", "length": 1},
    FinishType.ABORT: {"type": "abort", "message": "why"},
    FinishType.TIMEOUT: {"type": "timeout", "message": "why"},
    FinishType.DECLINED: {"type": "declined", "message": "why"},
}


def ended_by(path: str, body: dict[str, Any], finish: FinishType) -> Any:
    """Return the answer, or a stream's events, of a request that ends in this way after a token."""

    async def run(engine: FakeEngine) -> httpx.Response:
        asked = asyncio.create_task(engine.post(path, body))
        await engine.wait_for(lambda: bool(engine.requests))
        [request] = engine.requests
        first, last = engine.text(request, "w0 ", [0]), engine.text(request, "", [], finish)
        last.finish = FinishReason(finish, "x" if finish is FinishType.STOP else None, "why")
        engine.client.dispatch([TextBatch([first]), TextBatch([last])])
        return await asked

    async def on_a_fresh_one() -> httpx.Response:
        return await run(FakeEngine(hold=True))

    response = asyncio.run(on_a_fresh_one())
    assert response.status_code == 200, response.text
    return events(response) if body.get("stream") else response.json()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("finish", FinishType)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_openai_finish_reasons_are_openais_own(path: str, finish: FinishType, stream: bool) -> None:
    body = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    answer = ended_by(path, {**body, "stream": stream}, finish)
    for content in answer if stream else [answer]:
        check(STREAMS[path] if stream else ANSWERS[path], content)
    [choice] = (answer[-1] if stream else answer)["choices"]
    assert choice["finish_reason"] in OPENAI_REASONS
    if finish in (FinishType.STOP, FinishType.LENGTH):
        assert (choice["finish_reason"], "pdserve_finish" in choice) == (finish.value, False)
    else:
        described = {"type": finish.value, "message": "why"}
        assert (choice["finish_reason"], choice["pdserve_finish"]) == ("length", described)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("finish", FinishType)
def test_native_finish_reasons_are_sglangs_shape(finish: FinishType, stream: bool) -> None:
    answer = ended_by("/generate", {"text": "a", "stream": stream}, finish)
    for content in answer if stream else [answer]:
        check(STREAMS["/generate"] if stream else ANSWERS["/generate"], content)
    assert (answer[-1] if stream else answer)["meta_info"]["finish_reason"] == NATIVE[finish]


def test_the_page_lists_openais_finish_reasons_and_no_others() -> None:
    async def run(engine: FakeEngine) -> dict[str, Any]:
        schemas: dict[str, Any] = (await engine.get("/openapi.json")).json()["components"]["schemas"]
        return schemas

    schemas = with_engine(run)
    assert set(schemas["ChatChoice"]["properties"]["finish_reason"]["enum"]) == OPENAI_REASONS
    for name in ("CompletionChoice", "ChatChunkChoice"):
        one, null = schemas[name]["properties"]["finish_reason"]["anyOf"]
        assert (set(one["enum"]), null) == (OPENAI_REASONS, {"type": "null"})
    assert set(schemas["FinishReasonAnswer"]["properties"]["type"]["enum"]) == {finish.value for finish in FinishType}


def test_errors() -> None:
    async def run(engine: FakeEngine) -> None:
        engine.errors = [ReqError("", 400, "too long", field="text", code="context_length_exceeded")]
        too_long = await engine.post("/v1/completions", {"prompt": "a"})
        assert too_long.json()["error"]["code"] == "context_length_exceeded"
        for response in (too_long, await engine.get("/nope"), await engine.post("/generate", {"a": 1})):
            assert response.status_code >= 400
            check(ErrorAnswer, response.json())

    with_engine(run)


def test_the_openapi_page_shows_them() -> None:
    async def run(engine: FakeEngine) -> None:
        page = (await engine.get("/openapi.json")).json()
        names = page["components"]["schemas"]
        assert {"ChatAnswer", "CompletionAnswer", "GenerateAnswer", "ErrorAnswer", "ModelList"} <= names.keys()
        chat = page["paths"]["/v1/chat/completions"]["post"]["responses"]
        assert chat["200"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ChatAnswer"}
        event = chat["200"]["content"]["text/event-stream"]["schema"]["properties"]["data"]
        end, chunk = event["anyOf"]
        assert end == {"const": "[DONE]"}
        assert chunk["contentSchema"] == {"$ref": "#/components/schemas/ChatChunk"}
        [name] = page["paths"]["/v1/models/{name}"]["get"]["parameters"]
        assert (name["name"], name["in"], name["required"]) == ("name", "path", True)
        slot, action = page["paths"]["/slots/{id}"]["post"]["parameters"]
        assert (slot["in"], action["in"], action["name"], action["required"]) == ("path", "query", "action", True)
        assert action["schema"] == {"type": "string", "enum": ["save", "restore", "erase"]}
        _, owner = page["paths"]["/kv/sessions/{name}"]["delete"]["parameters"]
        assert (owner["in"], owner["name"], owner["required"]) == ("query", "owner", False)
        assert chat["4XX"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ErrorAnswer"}

    with_engine(run)


def bodies(schema: type[Body]) -> Iterator[type[Body]]:
    """Yield ``schema`` and those inside it."""
    yield schema
    for inner in inner_bodies(schema).values():
        if inner is not None:
            yield from bodies(inner)


@pytest.fixture(scope="module")
def shown_schemas() -> dict[str, Any]:
    async def run(engine: FakeEngine) -> dict[str, Any]:
        schemas: dict[str, Any] = (await engine.get("/openapi.json")).json()["components"]["schemas"]
        return schemas

    return with_engine(run)


@pytest.mark.parametrize("schema", dict.fromkeys(one for body in BODY_MODELS.values() for one in bodies(body)))
def test_the_page_says_which_fields_may_be_null_and_whether_others_are_refused(
    schema: type[Body], shown_schemas: dict[str, Any]
) -> None:
    shown = shown_schemas[schema.__name__]
    fields = shown.get("properties", {})
    nullable = {name for name, field in fields.items() if {"type": "null"} in field.get("anyOf", ())}
    assert nullable == fields.keys() - set(shown.get("required", ()))
    assert (shown.get("additionalProperties") is False) == schema.refuses_unknown
