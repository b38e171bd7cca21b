"""Counts of a prompt's tokens in the answers of every API."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import httpx

Json = dict[str, Any]


class Counted(NamedTuple):
    """What an answer says of its prompt. ``cached``: of each answer, or one number for all; None: not told."""

    prompt: int
    cached: list[int] | int | None


def of_openai(answer: Json) -> Counted:
    """Read an answer of OpenAI's older APIs."""
    usage = answer["usage"]
    return Counted(usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])


def of_native(answer: Any) -> Counted:
    """Read one answer of ``/generate``, or several."""
    metas = [one["meta_info"] for one in (answer if isinstance(answer, list) else [answer])]
    (prompt,) = {meta["prompt_tokens"] for meta in metas}
    return Counted(prompt, [meta["cached_tokens"] for meta in metas])


def of_llama(answer: Any) -> Counted:
    """Read one answer of ``/completion``, or several. Their timings must agree."""
    answers = answer if isinstance(answer, list) else [answer]
    (prompt,) = {one["tokens_evaluated"] for one in answers}
    timings = [one["timings"] for one in answers]
    assert all(one["cache_n"] + one["prompt_n"] == prompt for one in timings)
    assert [one["cache_n"] for one in timings] == [one["tokens_cached"] for one in answers]
    return Counted(prompt, [one["tokens_cached"] for one in answers])


def of_anthropic(answer: Json) -> Counted:
    """Read a message. Its input tokens leave out the cached ones."""
    usage = answer["usage"]
    assert usage["cache_creation_input_tokens"] == 0
    cached = usage["cache_read_input_tokens"]
    return Counted(usage["input_tokens"] + cached, cached)


def of_responses(answer: Json) -> Counted:
    """Read a response."""
    usage = answer["usage"]
    return Counted(usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"])


def of_ollama(answer: Json) -> Counted:
    """Read an answer of Ollama's, which has no field for cached tokens."""
    return Counted(answer["prompt_eval_count"], None)


READERS: Mapping[str, Callable[[Any], Counted]] = {
    "/generate": of_native,
    "/v1/completions": of_openai,
    "/v1/chat/completions": of_openai,
    "/completion": of_llama,
    "/completions": of_llama,
    "/api/generate": of_ollama,
    "/api/chat": of_ollama,
    "/v1/messages": of_anthropic,
    "/v1/responses": of_responses,
}
"""How to read the counts, by path."""


def last_of(path: str, response: httpx.Response) -> Any:
    """Return the events of a stream that have counts, in the form of a whole answer."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith(("data: {", "{"))]
    events = [json.loads(line) for line in lines]
    if path == "/v1/messages":
        return events[0]["message"]
    if path == "/v1/responses":
        return events[-1]["response"]
    if path == "/generate":
        return sorted(events, key=lambda event: event.get("index", 0))
    if path.startswith("/completion"):
        return sorted((event for event in events if event["stop"]), key=lambda event: event["index"])
    return events[-1]


def streaming(path: str) -> Json:
    """Return the fields that ask for a stream with counts."""
    with_usage = {"stream_options": {"include_usage": True}} if path.startswith(("/v1/chat", "/v1/comp")) else {}
    return {"stream": True, **with_usage}
