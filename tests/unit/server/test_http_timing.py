"""Where OpenAI's streams say where the time went."""

from __future__ import annotations

from typing import Any

import pytest
from support.fake_engine import FakeEngine, events, with_engine

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def stream(path: str, body: dict[str, Any]) -> list[Any]:
    """Return the chunks of an answer of two tokens."""

    async def check(engine: FakeEngine) -> list[Any]:
        return events(await engine.post(path, {**body, "max_tokens": 2, "stream": True}))

    return with_engine(check)


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "hi"})])
def test_the_chunk_with_the_usage_has_the_timing_of_one_answer(path: str, body: dict[str, Any]) -> None:
    asked = {**body, "stream_options": {"include_usage": True}}
    *chunks, last = stream(path, asked)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 2)
    assert (last["timing"]["queue_ms"], last["timing"]["transfer_bytes"]) == (1.235, 4096)
    assert not [chunk for chunk in chunks if "timing" in chunk]
    # Two answers have two timings, and no field to tell them apart.
    assert "timing" not in stream(path, {**asked, "n": 2})[-1]
    assert not [chunk for chunk in stream(path, body) if "timing" in chunk]
