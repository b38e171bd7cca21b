"""An instance's error reaches the client with its type, param, code and status, on every path through the router."""

from __future__ import annotations

import json

import orjson
import pytest
from support.router_rig import EVENT, generate, scenario

from pdserve.messages.error_codes import OVERLOADED
from pdserve.router.answer_relay import raise_first_error
from pdserve.router.endpoints import ControlEndpoints
from pdserve.router.errors import InstanceAnsweredError
from pdserve.router.instance import Instance, Role
from pdserve.runtime.web.errors import THREAD_UNSUPPORTED, anthropic_error, error_fields, llama_error
from pdserve.runtime.web.sse import StreamFormat

ERROR = {
    "message": "prompt: too long",
    "type": "invalid_request_error",
    "param": "prompt",
    "code": "context_length_exceeded",
    "status": 400,
}
EVENT_OF_IT = b'data: {"error": ' + json.dumps(ERROR).encode() + b"}\n\n"
WORKER = Instance("http://w", Role.UNIFIED)


def error_event(text: str) -> dict:
    """Return the error event in a stream's text."""
    (line,) = [line for line in text.splitlines() if line.startswith('data: {"error"')]
    return json.loads(line.removeprefix("data: "))["error"]


@pytest.mark.parametrize("stream", [False, True])
def test_as_an_answer(stream):
    @scenario()
    async def run(rig):
        w = await rig.instance("error")
        w.error = ERROR
        client = await rig.route(worker=[w])
        answer = await generate(client, stream=stream)
        assert (answer.status_code, answer.json()["error"]) == (400, ERROR)

    run()


@pytest.mark.parametrize(
    ("pieces", "is_status"),
    [
        ([EVENT_OF_IT], True),
        ([b": keep-alive\n\n" + EVENT_OF_IT], True),
        ([b": keep-alive\r\n\r\n: again\n\n" + EVENT_OF_IT], True),
        ([b": keep-alive\n\n", EVENT_OF_IT], False),
        ([b": keep-alive\n\n", b": keep-alive\n\n" + EVENT_OF_IT], False),
        ([EVENT, EVENT_OF_IT], False),
        ([EVENT + EVENT_OF_IT], False),
    ],
)
def test_as_an_event(pieces, is_status):
    @scenario()
    async def run(rig):
        w = await rig.instance("pieces")
        w.pieces = pieces
        client = await rig.route(worker=[w])
        async with client.stream("POST", "/generate", json={"text": "x", "stream": True}) as answer:
            chunks = answer.aiter_text()
            text = await anext(chunks)
            w.go_on.set()
            text += "".join([chunk async for chunk in chunks])
        if is_status:
            assert (answer.status_code, json.loads(text)["error"]) == (400, ERROR)
        else:
            assert (answer.status_code, error_event(text)) == (200, ERROR)
        assert ("keep-alive" in text) == (not is_status and pieces[0].startswith(b":"))

    run()


@pytest.mark.parametrize("stream", [False, True])
def test_where_the_answer_goes_on(stream):
    """An error that the request itself has at the instance that goes on with it."""

    @scenario(retries=0)
    async def run(rig):
        old, new = await rig.instance("move"), await rig.instance("error")
        old.follower, new.error = new, ERROR | {"status": 408, "type": "timeout_error"}
        client = await rig.route(worker=[old], decode=[new])
        answer = await generate(client, stream=stream)
        error = error_event(answer.text) if stream else answer.json()["error"]
        assert error == new.error
        if not stream:
            assert (answer.status_code, answer.headers["x-should-retry"]) == (408, "false")

    run()


def test_a_status_that_the_body_lacks_is_added():
    error = InstanceAnsweredError(429, b'{"error": {"message": "full", "code": 7}}', "w", ())
    assert error.fields() == {"message": "full", "code": 7, "status": 429}
    other = InstanceAnsweredError(500, b"<html>", "worker http://w", ())
    assert other.fields()["message"] == "worker http://w answered with status 500"


@pytest.mark.parametrize("shape", [anthropic_error, llama_error])
@pytest.mark.parametrize(
    "fields",
    [
        error_fields(502, "the peer is gone", "transfer_error"),
        error_fields(503, "full", code=OVERLOADED),
        error_fields(400, "too many tokens", code="context_length_exceeded", param="messages"),
        error_fields(400, "no threads", code=THREAD_UNSUPPORTED, param="thread"),
    ],
)
def test_a_router_goes_by_pdserves_type_and_code_in_an_api_with_others(fields, shape):
    body = shape(fields)
    error = InstanceAnsweredError(fields["status"], orjson.dumps(body), "w", ())
    assert (error.kind, error.blames_peer) == (fields["type"], fields["type"] == "transfer_error")
    assert (error.code, error.is_load) == (fields["code"], fields["code"] == OVERLOADED)
    assert shape(error.fields()) == body


def test_headers_that_the_api_promises_are_there_after_an_event_too():
    with pytest.raises(InstanceAnsweredError) as raised:
        raise_first_error(b'data: {"error": {"message": "full", "status": 429}}\n\n', WORKER, StreamFormat())
    assert raised.value.all_headers() == [(b"retry-after", b"1")]
    kept = InstanceAnsweredError(429, b"", "w", [(b"retry-after", b"9")])
    assert kept.all_headers() == [(b"retry-after", b"9")]


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_many_comments_before_the_first_event_take_no_time(end):
    comments = (b": ping" + end) * 10_000
    raise_first_error(comments + b'data: {"text": "a"}' + 2 * end, WORKER, StreamFormat())
    with pytest.raises(InstanceAnsweredError, match="full"):
        raise_first_error(comments + b'data: {"error": {"message": "full"}}' + 2 * end, WORKER, StreamFormat())


@pytest.mark.parametrize(
    "events", [EVENT, EVENT + EVENT_OF_IT, b": x\n\n", b'data: {"text": "data: {\\"error\\""}\n\n', b""]
)
def test_what_is_no_first_error(events):
    raise_first_error(events, WORKER, StreamFormat())


@scenario(retries=0)
async def test_a_stream_that_ends_with_an_error_is_no_success(rig):
    bad = await rig.instance("crash_text")
    client = await rig.route(worker=[bad, await rig.instance(health=503)])
    for _ in range(3):
        for _ in range(2):
            assert (await generate(client)).status_code == 500
        bad.script, bad.pieces = "pieces", [EVENT + EVENT_OF_IT]
        bad.go_on.set()
        assert error_event((await generate(client, stream=True)).text) == ERROR
        bad.script = "crash_text"
    info = (await client.get("/server_info")).json()["instances"][0]
    assert info["resting_seconds"] > 0


@scenario()
async def test_a_fault_of_the_router_says_that_the_connection_closes(rig):
    def broken(*_):
        raise ValueError("a fault")

    client = await rig.route(worker=[await rig.instance()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ControlEndpoints, "ask_all", broken)
        response = await client.get("/server_info")
    assert (response.status_code, response.headers["connection"]) == (500, "close")
    assert response.json()["error"]["message"] == "the router failed on this request; its log says why"
