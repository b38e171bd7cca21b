"""Cached prompt tokens in the answers of every API, also where several answers share a prompt."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import httpx
import pytest
from support.endpoints import GENERATION_PATHS
from support.fake_engine import FakeEngine, with_engine
from support.prompt_counts import READERS, Counted, Json, last_of, of_llama, of_native, of_ollama, streaming

from pdserve.messages.outputs import FinishType, ReqMeta, TextBatch, Timing

PROMPT_TOKENS, CACHED = 70, 48
"""Tokens of the prompt, and those that were cached before the request."""
OF_FORKS = 69
"""Cached tokens that the engine reports of further answers to the prompt, which is computed once."""
USER = {"role": "user", "content": "a"}


class Asked(NamedTuple):
    """How a path is asked."""

    body: Json
    four: Json | None = None
    """Fields that ask for four answers; None: the API has one."""


APIS = {
    "/generate": Asked({"text": "a"}, {"sampling_params": {"n": 4}}),
    "/v1/completions": Asked({"prompt": "a"}, {"n": 4}),
    "/v1/chat/completions": Asked({"messages": [USER]}, {"n": 4}),
    "/completion": Asked({"prompt": "a"}, {"n_cmpl": 4}),
    "/completions": Asked({"prompt": "a"}, {"n_cmpl": 4}),
    "/api/generate": Asked({"prompt": "a"}),
    "/api/chat": Asked({"messages": [USER]}),
    "/v1/messages": Asked({"messages": [USER], "max_tokens": 9}),
    "/v1/responses": Asked({"input": "a"}),
}
FOUR = [path for path, asked in APIS.items() if asked.four is not None]


def ask(path: str, body: Json) -> httpx.Response:
    """Answer a request; a part of its prompt was cached."""

    async def run(engine: FakeEngine) -> httpx.Response:
        asking = asyncio.create_task(engine.post(path, body))
        await engine.wait_for(lambda: bool(engine.requests))
        for i, request in enumerate(engine.requests):
            item = engine.text(request, "Red", [7], FinishType.LENGTH)
            item.meta = ReqMeta(PROMPT_TOKENS, 1, OF_FORKS if i else CACHED, Timing())
            engine.client.dispatch([TextBatch([item])])
        return await asking

    response = with_engine(run, hold=True)
    assert response.status_code == 200, response.text
    return response


def expected(path: str, answers: int) -> Counted:
    read = READERS[path]
    if read is of_ollama:
        return Counted(PROMPT_TOKENS, None)
    each = [CACHED, *[OF_FORKS] * (answers - 1)]
    # A prompt with several answers counts once, with what was cached before it.
    return Counted(PROMPT_TOKENS, each if read in (of_native, of_llama) else CACHED)


def test_every_path_that_generates_is_here() -> None:
    assert APIS.keys() == READERS.keys() == set(GENERATION_PATHS)


@pytest.mark.parametrize("path", APIS)
def test_an_answer_counts_cached_tokens_whole_and_in_a_stream(path: str) -> None:
    asked, read = APIS[path], READERS[path]
    assert read(ask(path, {**asked.body, "stream": False}).json()) == expected(path, 1)
    assert read(last_of(path, ask(path, {**asked.body, **streaming(path)}))) == expected(path, 1)


@pytest.mark.parametrize("path", FOUR)
def test_four_answers_count_the_prompt_once_or_each_its_own(path: str) -> None:
    asked, read = APIS[path], READERS[path]
    body = {**asked.body, **(asked.four or {})}
    assert read(ask(path, body).json()) == expected(path, 4)
    assert read(last_of(path, ask(path, {**body, **streaming(path)}))) == expected(path, 4)
