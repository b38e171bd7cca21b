"""Faults in the code that writes answers, as a client or a router sees them."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from support.fake_engine import FakeEngine, with_engine
from support.served_app import serving

from pdserve.messages.outputs import FinishType, TextBatch
from pdserve.server.http.ollama import generate
from pdserve.server.http.ollama.writer import OllamaRenderer
from pdserve.server.http.responses.writer import ResponseWriter

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi!"}]}


def broken(*_: Any) -> Any:
    raise ValueError("a fault")


@pytest.mark.parametrize("stream", [True, False])
def test_a_fault_before_the_first_event_is_a_500(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    monkeypatch.setattr(OllamaRenderer, "_write", broken)

    async def run(engine: FakeEngine) -> httpx.Response:
        return await engine.post("/api/chat", {**CHAT, "stream": stream})

    response = with_engine(run, served_model_name="m")
    assert response.status_code == 500
    assert response.json()["error"] == "internal error (ValueError); the server's log has the details"
    assert "a fault" in caplog.text


def test_a_later_fault_is_an_error_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OllamaRenderer, "last_events", broken)

    async def run(engine: FakeEngine) -> httpx.Response:
        asking = asyncio.create_task(engine.post("/api/chat", CHAT))
        await engine.wait_for(lambda: bool(engine.requests))
        (request,) = engine.requests
        live = engine.client.live.get(request.rid)
        engine.client.dispatch([TextBatch([engine.text(request, "a", [0])])])
        async with asyncio.timeout(10):
            while live is not None and not live.choice.opened:
                await asyncio.sleep(0)
        engine.client.dispatch([TextBatch([engine.text(request, "b", [1], FinishType.STOP)])])
        return await asking

    response = with_engine(run, hold=True, served_model_name="m")
    first, last = response.text.splitlines()
    assert response.status_code == 200
    assert '"content":"a"' in first
    assert last.startswith('{"error":"internal error (ValueError)')


def test_a_fault_that_comes_again_while_a_response_fails_is_an_error_event(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(engine: FakeEngine) -> httpx.Response:
        asking = asyncio.create_task(engine.post("/v1/responses", {"input": "Hi!", "stream": True}))
        await engine.wait_for(lambda: bool(engine.requests))
        (request,) = engine.requests
        live = engine.client.live.get(request.rid)
        engine.client.dispatch([TextBatch([engine.text(request, "a", [0])])])
        async with asyncio.timeout(10):
            while live is not None and not live.choice.opened:
                await asyncio.sleep(0)
        monkeypatch.setattr(ResponseWriter, "_encoded", broken)
        engine.client.dispatch([TextBatch([engine.text(request, "b", [1], FinishType.STOP)])])
        return await asking

    *_, last = with_engine(run, hold=True).text.removesuffix("\n\n").split("\n\n")
    assert last.startswith("event: error\n")
    assert "internal error (ValueError)" in last


def test_a_fault_before_an_answer_says_that_the_connection_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "chat_of", broken)

    async def run(engine: FakeEngine) -> httpx.Response:
        async with serving(engine) as port, httpx.AsyncClient() as client:
            return await client.post(f"http://127.0.0.1:{port}/api/chat", json=CHAT)

    response = with_engine(run, served_model_name="m")
    assert (response.status_code, response.headers["connection"]) == (500, "close")
    assert response.json()["error"] == "internal error (ValueError); the server's log has the details"
