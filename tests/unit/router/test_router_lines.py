"""The router passes on the streams of Ollama's API, which are lines of JSON, and their errors."""

from __future__ import annotations

import json

import pytest
from support.router_rig import FakeInstance, Rig, scenario

from pdserve.router.request_body import RequestBody
from pdserve.runtime.web.apis import OLLAMA_LINES, path_table
from pdserve.runtime.web.paths import Server

LINE = b'{"message":{"content":"a"},"done":false}\n'
END = b'{"message":{"content":""},"done":true}\n'
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
FULL = {"error": "full", "type": "overloaded_error", "param": None, "code": "rate_limit_exceeded", "status": 429}


async def streaming(rig: Rig, *pieces: bytes) -> FakeInstance:
    """Return an instance that streams ``pieces``."""
    worker = await rig.instance("pieces")
    worker.content_type, worker.last_piece = OLLAMA_LINES.content_type, b""
    worker.pieces = list(pieces)
    worker.go_on.set()
    return worker


def line_of(content: dict[str, object]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"


@pytest.mark.parametrize("cut", [7, len(LINE) - 1])
def test_lines_pass_through(cut: int) -> None:
    @scenario(retries=0)
    async def run(rig: Rig) -> None:
        client = await rig.route(worker=[await streaming(rig, LINE[:cut], LINE[cut:] + LINE, END)])
        response = await client.post("/api/chat", json=CHAT)
        assert (response.content, response.headers["content-type"]) == (LINE + LINE + END, "application/x-ndjson")

    run()


def test_the_first_error_becomes_the_status() -> None:
    @scenario(retries=0)
    async def run(rig: Rig) -> None:
        client = await rig.route(worker=[await streaming(rig, line_of(FULL))])
        response = await client.post("/api/chat", json=CHAT)
        assert (response.status_code, response.json()) == (429, FULL)

    run()


def test_an_instances_error_keeps_its_fields() -> None:
    @scenario(retries=0)
    async def run(rig: Rig) -> None:
        worker = await rig.instance("error")
        client = await rig.route(worker=[worker])
        worker.error = {**FULL, "message": "full"}
        assert (await client.post("/api/chat", json=CHAT)).json() == FULL

    run()


def test_a_later_error_is_the_last_line() -> None:
    @scenario(retries=0)
    async def run(rig: Rig) -> None:
        worker = await streaming(rig, LINE)
        client = await rig.route(worker=[worker])
        worker.script = "say_and_leave"
        response = await client.post("/api/chat", json=CHAT)
        first, last = response.content.splitlines(keepends=True)
        assert (response.status_code, first) == (200, LINE)
        assert last.startswith(OLLAMA_LINES.error_sign)
        assert json.loads(last)["status"] == 502

    run()


def test_a_prompt_that_waits_may_be_computed_elsewhere() -> None:
    @scenario(retries=1)
    async def run(rig: Rig) -> None:
        waiting = await streaming(rig, OLLAMA_LINES.keep_alive, line_of(FULL | {"status": 503, "code": "draining"}))
        waiting.go_on.clear()
        client = await rig.route(worker=[waiting])
        async with client.stream("POST", "/api/chat", json=CHAT) as response:
            lines = response.aiter_lines()
            assert await anext(lines) == OLLAMA_LINES.keep_alive.decode().rstrip()
            waiting.go_on.set()
            rest = [json.loads(line) async for line in lines]
        assert (response.status_code, rest[-1]["code"]) == (200, "draining")
        assert len(waiting.requests) == 2

    run()


def test_the_rest_of_a_moved_answer_comes_from_the_other_instance() -> None:
    @scenario(retries=0)
    async def run(rig: Rig) -> None:
        follower = await streaming(rig, END)
        ticket = {"epoch": "", "host": "127.0.0.1", "port": follower.port, "key": "k" * 32, "chars": 1, "tokens": 1}
        ticket |= {"opened": True, "rid": "x", "created": 0}
        mover = await streaming(rig, LINE, OLLAMA_LINES.moved(json.dumps(ticket).encode()))
        client = await rig.route(worker=[mover, follower])
        while not (mover.requests and follower.requests):
            response = await client.post("/api/chat", json=CHAT)
        assert response.content in (LINE + END, END)
        assert any("x-pdserve-ticket" in seen.headers for seen in follower.requests)

    run()


@pytest.mark.parametrize(
    ("body", "streams"), [(b"{}", True), (b'{"stream": null}', True), (b'{"stream": false}', False)]
)
def test_an_answer_streams_unless_the_body_says_otherwise(body: bytes, streams: bool) -> None:
    table = path_table(Server.ROUTER)
    for path, expected in (("/api/chat", streams), ("/v1/chat/completions", False)):
        facts = table.find(path)
        assert facts is not None
        assert RequestBody.parse(body, facts=facts).stream == expected
