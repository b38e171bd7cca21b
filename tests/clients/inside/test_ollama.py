"""The ``ollama`` package: its own types check every answer."""

from __future__ import annotations

import asyncio
from typing import Any

import ollama
import pytest

ASK = [{"role": "user", "content": "What is the capital of France?"}]
OPTIONS = {"temperature": 0, "num_predict": 12, "num_ctx": 4096}


@pytest.fixture
def client(url: str) -> ollama.Client:
    return ollama.Client(url)


def check_end(part: Any) -> None:
    """Check the fields at the end of an answer."""
    assert part.done
    assert part.done_reason in ("length", "stop")
    assert part.total_duration >= part.prompt_eval_duration + part.eval_duration > 0
    assert part.prompt_eval_count > 0
    assert 0 < part.eval_count <= 12


@pytest.mark.parametrize("tag", ["", ":latest"])
def test_chat_and_stream(client: ollama.Client, model: str, tag: str) -> None:
    whole = client.chat(model + tag, ASK, options=OPTIONS)
    assert "Paris" in whole.message.content
    check_end(whole)
    parts = list(client.chat(model + tag, ASK, options=OPTIONS, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    check_end(parts[-1])


def test_generate_and_stream(client: ollama.Client, model: str) -> None:
    whole = client.generate(model, ASK[0]["content"], options=OPTIONS)
    assert whole.response == client.chat(model, ASK, options=OPTIONS).message.content
    check_end(whole)
    parts = list(client.generate(model, ASK[0]["content"], options=OPTIONS, stream=True))
    assert "".join(part.response for part in parts) == whole.response
    raw = client.generate(model, "The capital of France is", raw=True, options=OPTIONS)
    assert raw.response != whole.response


def test_format(client: ollama.Client, model: str) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    answer = client.chat(model, ASK, format=schema, options={"temperature": 0, "num_predict": 60})
    assert answer.message.content.replace(" ", "").replace("\n", "") in ('{"n":1}', '{"n":2}')


def test_the_asynchronous_client(url: str, model: str) -> None:
    async def ask() -> Any:
        client = ollama.AsyncClient(url)
        return [part async for part in await client.chat(model, ASK, options=OPTIONS, stream=True)]

    check_end(asyncio.run(ask())[-1])


def test_embeddings(client: ollama.Client, model: str) -> None:
    both = client.embed(model, ["Paris", "Rome"])
    one = client.embed(model, "Paris")
    assert list(both.embeddings[0]) == pytest.approx(list(one.embeddings[0]), abs=1e-3)
    assert list(client.embeddings(model, "Paris").embedding) == pytest.approx(list(one.embeddings[0]), abs=1e-3)
    assert both.prompt_eval_count > 0


def test_models(client: ollama.Client, model: str) -> None:
    listed = client.list().models
    assert f"{model}:latest" in [one.model for one in listed]
    assert listed[0].size > 0
    assert listed[0].details.family == "llama"
    running = client.ps().models
    assert running[0].context_length > 0
    shown = client.show(model)
    assert shown.modelinfo["llama.context_length"] == running[0].context_length
    assert "completion" in shown.capabilities


def test_errors(client: ollama.Client, model: str) -> None:
    with pytest.raises(ollama.ResponseError, match="not found") as caught:
        client.chat("other", ASK)
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="images"):
        client.chat(model, [{**ASK[0], "images": ["aGk="]}])
    for stream in (False, True):
        with pytest.raises(ollama.ResponseError, match="context"):
            list(client.chat(model, [{"role": "user", "content": "word " * 20_000}], stream=stream))
    with pytest.raises(ollama.ResponseError, match="context"):
        client.embed(model, "word " * 20_000, truncate=False)
