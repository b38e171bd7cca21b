"""Streams while a call grows, of which nothing can be written before it is complete."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.fake_engine import FakeEngine, with_engine

from pdserve.messages.outputs import FinishType, TextBatch
from pdserve.runtime.web.apis import OLLAMA_LINES
from pdserve.runtime.web.sse import OPENAI_STREAM, StreamFormat
from pdserve.server.http.generation import engine_response

QWEN = 'tools <tool_call>{"name": .., "arguments": ..}</tool_call> <think></think>'
PIECES = ("<tool_call>", '{"name": "f", ', '"arguments": ', "{}}", "</tool_call>")
MESSAGES = [{"role": "user", "content": "Call f."}]
CHAT_TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
TOOL = {"type": "function", "name": "f", "parameters": {}}


@pytest.mark.parametrize(
    ("path", "body", "framing"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "tools": [CHAT_TOOL]}, OPENAI_STREAM),
        ("/api/chat", {"messages": MESSAGES, "tools": [CHAT_TOOL]}, OLLAMA_LINES),
        ("/v1/responses", {"input": "Call f.", "tools": [TOOL]}, OPENAI_STREAM),
    ],
)
@pytest.mark.parametrize(("seconds", "expected"), [(0.0, True), (1e9, False)])
def test_a_long_silence_while_tokens_come_is_broken(
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    framing: StreamFormat,
    seconds: float,
    expected: bool,
) -> None:
    monkeypatch.setattr(engine_response, "PROGRESS_SECONDS", seconds)

    async def run(engine: FakeEngine) -> bytes:
        asking = asyncio.create_task(engine.post(path, {**body, "stream": True}))
        await engine.wait_for(lambda: bool(engine.requests))
        (request,) = engine.requests
        for i, piece in enumerate(PIECES):
            item = engine.text(request, piece, [i], FinishType.STOP if piece == PIECES[-1] else None)
            engine.client.dispatch([TextBatch([item])])
            for _ in range(5):
                await asyncio.sleep(0)
        return (await asking).content

    content = with_engine(run, hold=True, template=QWEN)
    assert (framing.progress in content) == expected
    assert b'"f"' in content
