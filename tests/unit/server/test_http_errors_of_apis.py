"""Errors of every API, before its stream has begun and in its middle, and what the log holds of requests."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest
from pydantic import BaseModel
from support.endpoints import ENDPOINTS, GENERATION_BODIES, GENERATION_PATHS
from support.fake_engine import FakeEngine, with_engine
from support.machine import limit

from pdserve.messages.error_codes import OVERLOADED
from pdserve.messages.outputs import FinishType, ReqError, TextBatch
from pdserve.router.errors import InstanceAnsweredError
from pdserve.runtime.web.apis import PATHS
from pdserve.runtime.web.errors import TOO_LONG
from pdserve.runtime.web.paths import PathFacts

QWEN = 'tools <tool_call>{"name": .., "arguments": ..}</tool_call> <think></think>'
USER = {"role": "user", "content": "a"}
PROMPT_FIELDS = {
    "/generate": "text",
    "/v1/chat/completions": "messages",
    "/api/chat": "messages",
    "/v1/messages": "messages",
    "/v1/responses": "input",
}
"""The field of the prompt where it is not ``prompt``."""
TYPES = {
    "/v1/messages": {503: "overloaded_error", 500: "api_error"},
    "/completion": {503: "unavailable_error", 500: "server_error"},
    "/completions": {503: "unavailable_error", 500: "server_error"},
}
"""Types of errors by status, of APIs with types of their own."""
USUAL_TYPES = {503: "overloaded_error", 500: "server_error"}
SECRET = "canary-4711"
"""Stands for what a log must not hold: arguments of calls, prompts, answers, tools."""


def facts_of(path: str) -> PathFacts:
    return next(facts for facts in PATHS if facts.path == path)


def error_model(path: str) -> type[BaseModel]:
    return ENDPOINTS[facts_of(path)].error


def fields_of(path: str, body: bytes) -> dict[str, Any]:
    """Return the fields of an error that has the declared shape."""
    error_model(path).model_validate_json(body, strict=True)
    content: dict[str, Any] = json.loads(body)
    return content["error"] if isinstance(content["error"], dict) else content


async def opened(engine: FakeEngine, path: str, text: str, body: dict[str, Any]) -> asyncio.Task[httpx.Response]:
    """Begin a stream with ``text``, which its client has been sent."""
    asking = asyncio.create_task(engine.post(path, {**GENERATION_BODIES[path], "stream": True, **body}))
    await engine.wait_for(lambda: bool(engine.requests))
    (request,) = engine.requests
    engine.client.dispatch([TextBatch([engine.text(request, text, [7])])])
    live = engine.client.live.get(request.rid)
    async with asyncio.timeout(limit(10)):
        while live is not None and not live.choice.opened:
            await asyncio.sleep(0)
    return asking


def test_every_path_that_generates_is_here() -> None:
    assert GENERATION_BODIES.keys() == set(GENERATION_PATHS)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", GENERATION_PATHS)
def test_an_error_before_the_first_token_has_its_status_and_the_apis_shape(path: str, stream: bool) -> None:
    async def run(engine: FakeEngine) -> None:
        engine.errors = [ReqError("", 400, "too long", field="text", code=TOO_LONG)]
        body = (
            {**GENERATION_BODIES[path], "stream": stream, "store": False}
            if path == "/v1/responses"
            else {**GENERATION_BODIES[path], "stream": stream}
        )
        answer = await engine.post(path, body)
        assert answer.status_code == 400
        assert answer.headers["content-type"] == "application/json"
        error = fields_of(path, answer.content)
        assert error["status"] == 400
        assert error["param"] == PROMPT_FIELDS.get(path, "prompt")
        # A router goes by the code, whatever the API calls it.
        assert InstanceAnsweredError(400, answer.content, "w", ()).code == TOO_LONG

    with_engine(run)


@pytest.mark.parametrize("path", GENERATION_PATHS)
def test_a_field_of_the_wrong_type_is_refused_in_the_apis_shape(path: str) -> None:
    async def run(engine: FakeEngine) -> None:
        answer = await engine.post(path, {**GENERATION_BODIES[path], "stream": "yes"})
        error = fields_of(path, answer.content)
        assert (answer.status_code, error["param"], error["status"]) == (400, "stream", 400)
        assert not engine.requests

    with_engine(run)


@pytest.mark.parametrize("status", [500, 503])
@pytest.mark.parametrize("path", GENERATION_PATHS)
def test_an_error_in_the_middle_of_a_stream_is_its_last_event(path: str, status: int) -> None:
    async def run(engine: FakeEngine) -> httpx.Response:
        asking = await opened(engine, path, "Red", {})
        kind, code = ("overloaded_error", OVERLOADED) if status == 503 else ("server_error", None)
        engine.client.dispatch([ReqError(engine.requests[0].rid, status, "it broke", kind, code=code)])
        return await asking

    response = with_engine(run, hold=True)
    framing = facts_of(path).stream_format
    assert response.status_code == 200
    assert b"Red" in response.content
    content = response.content.removesuffix(framing.last_event)
    assert len(content) == len(response.content) - len(framing.last_event)
    at = content.rindex(framing.error_sign)
    error = content[at:].removeprefix(framing.before_error).strip()
    assert framing.has_error(response.content)
    own = json.loads(error)
    # Numbered events have fields of their own before the error.
    extra = json.loads(framing.error_start.rstrip(b",") + b"}")
    assert {name: own[name] for name in extra} == extra
    shape = {name: value for name, value in own.items() if name not in extra}
    fields = fields_of(path, json.dumps(shape).encode())
    assert (fields["status"], "it broke" in json.dumps(own)) == (status, True)
    assert fields["type"] == TYPES.get(path, USUAL_TYPES)[status]


WEATHER = {"name": "weather", "description": SECRET, "parameters": {"type": "object"}}
FUNCTION = {"type": "function", "function": WEATHER}
ARGUMENTS = json.dumps({"city": SECRET})
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
OUTPUT = f"<think>\n{SECRET}\n</think>\n\n{SECRET}\n{CALL}"
SECRETIVE = {"role": "user", "content": SECRET}
CALLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            SECRETIVE,
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": SECRET},
        ],
        "tools": [FUNCTION],
    },
    "/api/chat": {
        "messages": [
            SECRETIVE,
            {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": SECRET}}}]},
            {"role": "tool", "content": SECRET},
        ],
        "tools": [FUNCTION],
    },
    "/v1/messages": {
        "messages": [
            SECRETIVE,
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c", "name": "weather", "input": {"city": SECRET}}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": SECRET}]},
        ],
        "tools": [{"name": "weather", "description": SECRET, "input_schema": {"type": "object"}}],
    },
    "/v1/responses": {
        "input": [
            SECRETIVE,
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": ARGUMENTS},
            {"type": "function_call_output", "call_id": "c", "output": SECRET},
        ],
        "tools": [{"type": "function", **WEATHER}],
    },
}
"""Bodies with secrets in prompts, tools, arguments and outputs of calls."""


def told(caplog: pytest.LogCaptureFixture) -> str:
    """Return all that was logged, with tracebacks and extra fields."""
    formatter = logging.Formatter()
    return "\n".join(f"{formatter.format(record)} {record.__dict__}" for record in caplog.records)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", CALLS)
def test_no_text_and_no_arguments_of_a_call_are_logged(
    path: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def run(engine: FakeEngine) -> httpx.Response:
        asking = asyncio.create_task(engine.post(path, {**GENERATION_BODIES[path], **CALLS[path], "stream": stream}))
        await engine.wait_for(lambda: bool(engine.requests))
        item = engine.text(engine.requests[0], OUTPUT, [7], FinishType.STOP)
        engine.client.dispatch([TextBatch([item])])
        return await asking

    with caplog.at_level(logging.DEBUG):
        response = with_engine(run, hold=True, template=QWEN)
    assert response.status_code == 200, response.text
    assert response.text.count(SECRET) >= 2
    assert path in told(caplog)
    assert SECRET not in told(caplog)


@pytest.mark.parametrize("field", ["tools", "messages"])
@pytest.mark.parametrize("path", CALLS)
def test_what_a_refused_body_holds_is_not_logged(path: str, field: str, caplog: pytest.LogCaptureFixture) -> None:
    name = "input" if path == "/v1/responses" and field == "messages" else field
    wrong = [SECRET, {"role": SECRET, "type": SECRET, "content": {"arguments": SECRET}}]

    async def run(engine: FakeEngine) -> httpx.Response:
        return await engine.post(path, {**GENERATION_BODIES[path], **CALLS[path], name: wrong})

    with caplog.at_level(logging.DEBUG):
        response = with_engine(run, template=QWEN)
    assert response.status_code == 400, response.text
    assert path in told(caplog)
    assert SECRET not in told(caplog)


@pytest.mark.parametrize("path", CALLS)
def test_a_call_is_not_logged_if_its_answer_fails(path: str, caplog: pytest.LogCaptureFixture) -> None:
    async def run(engine: FakeEngine) -> httpx.Response:
        asking = await opened(engine, path, OUTPUT, CALLS[path])
        engine.client.dispatch([ReqError(engine.requests[0].rid, 500, "it broke")])
        return await asking

    with caplog.at_level(logging.DEBUG):
        response = with_engine(run, hold=True, template=QWEN)
    assert b"it broke" in response.content
    assert SECRET in response.text
    assert SECRET not in told(caplog)
