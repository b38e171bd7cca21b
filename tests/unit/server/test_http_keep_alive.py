"""A stream on which nothing moves: a comment now and then, and the status before the first token."""

from __future__ import annotations

import asyncio
import json
import socket

import httpx
import pytest
from support.fake_engine import FakeEngine, with_engine
from support.machine import limit

from pdserve.messages.outputs import FinishType, ReqError, TextBatch
from pdserve.runtime.web.apis import OLLAMA_LINES
from pdserve.runtime.web.ports import listen
from pdserve.server.http.engine.submission import Submission
from pdserve.server.http.generation import engine_response

STREAM = {"prompt": "a", "stream": True}
COMPLETIONS = "/v1/completions"
COMMENT = ": keep-alive"


async def silent(
    monkeypatch: pytest.MonkeyPatch, engine: FakeEngine, ticks: int, path: str = COMPLETIONS
) -> asyncio.Task[httpx.Response]:
    """Start a streaming request, and wait until its engine has been silent for more than ``ticks`` intervals."""
    seen = 0
    enough = asyncio.Event()
    tick = Submission.tick

    def count(submission: Submission) -> None:
        nonlocal seen
        seen += 1
        tick(submission)
        if seen > ticks:
            monkeypatch.setattr(engine_response, "KEEP_ALIVE_SECONDS", 60.0)
            enough.set()

    monkeypatch.setattr(Submission, "tick", count)
    monkeypatch.setattr(engine_response, "KEEP_ALIVE_SECONDS", 0.001)
    task = asyncio.create_task(engine.post(path, STREAM))
    async with asyncio.timeout(limit(10)):
        await enough.wait()
    return task


def test_a_silent_stream_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(engine: FakeEngine) -> httpx.Response:
        task = await silent(monkeypatch, engine, 3)
        item = engine.text(engine.requests[0], "w0 ", [0], FinishType.LENGTH)
        engine.client.dispatch([TextBatch([item])])
        return await task

    response = with_engine(run, hold=True)
    assert response.status_code == 200
    parts = response.text.split("\n\n")
    assert parts.count(COMMENT) >= 3
    content = [part for part in parts if part != COMMENT]
    assert content[0].startswith("data: {")
    assert content[1:] == ["data: [DONE]", ""]


def test_a_silent_stream_of_lines_is_kept_alive_by_a_line_that_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(engine: FakeEngine) -> httpx.Response:
        task = await silent(monkeypatch, engine, 3, "/api/generate")
        item = engine.text(engine.requests[0], "w0 ", [0], FinishType.LENGTH)
        engine.client.dispatch([TextBatch([item])])
        return await task

    response = with_engine(run, hold=True)
    lines = response.content.splitlines(keepends=True)
    assert lines.count(OLLAMA_LINES.keep_alive) >= 3
    content = [json.loads(line) for line in lines]
    assert "".join(line["response"] for line in content) == "w0 "
    assert [line["done"] for line in content] == [False] * (len(content) - 1) + [True]


def test_an_error_after_the_first_comment_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(engine: FakeEngine) -> httpx.Response:
        task = await silent(monkeypatch, engine, 1)
        engine.client.dispatch([ReqError(engine.requests[0].rid, 503, "the peer is gone")])
        return await task

    response = with_engine(run, hold=True)
    assert response.status_code == 200
    assert response.text.startswith(COMMENT)
    assert '"the peer is gone"' in response.text
    assert response.text.endswith("data: [DONE]\n\n")


def test_a_short_answer_has_no_comment() -> None:
    async def run(engine: FakeEngine) -> httpx.Response:
        return await engine.post("/v1/completions", STREAM)

    assert COMMENT not in with_engine(run).text


def test_a_short_answer_waits_for_no_acknowledgement() -> None:
    """Nagle's algorithm would hold a body back for the 40 ms that a client may take to acknowledge the head."""

    async def run() -> int:
        delayed = asyncio.get_running_loop().create_future()

        class Front(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                sock = transport.get_extra_info("socket")
                delayed.set_result(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
                transport.close()

        listener = listen("127.0.0.1", 0, 1)
        server = await asyncio.get_running_loop().create_server(Front, sock=listener)
        async with server:
            _, writer = await asyncio.open_connection(*listener.getsockname())
            at_once: int = await delayed
            writer.close()
            await writer.wait_closed()
        return at_once

    assert asyncio.run(run()) == 1
