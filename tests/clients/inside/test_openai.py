"""The openai package: what it can ask of chat, completions, responses and models, and each answer in its own types."""

from __future__ import annotations

import itertools
import json
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ASK = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
CHAT: dict[str, Any] = {"messages": ASK, "temperature": 0, "max_tokens": 12}
COMPLETION: dict[str, Any] = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 8}

CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "max_completion_tokens": {"max_completion_tokens": 12},
    "several": {"n": 3, "temperature": 1.0, "seed": 7},
    "stop": {"stop": ["."]},
    "logprobs": {"logprobs": True, "top_logprobs": 5},
    "logprobs without others": {"logprobs": True},
    "penalties": {"frequency_penalty": 0.5, "presence_penalty": -0.5, "top_p": 0.9, "logit_bias": {"42": -100}},
    "what changes nothing": {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "response_format": {"type": "text"},
        "parallel_tool_calls": True,
        "modalities": ["text"],
    },
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "ann"}]},
    "a system's word": {"messages": [{"role": "system", "content": "Be brief."}, *ASK]},
    "a developer's": {"messages": [{"role": "developer", "content": "Be brief."}, *ASK]},
    "history": {"messages": [*ASK, {"role": "assistant", "content": "Paris"}, {"role": "user", "content": "Sure?"}]},
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "several prompts": {"prompt": ["One", "Two"], "n": 2, "temperature": 1.0},
    "token ids": {"prompt": [504, 3575, 282]},
    "lists of token ids": {"prompt": [[504], [3575, 282]]},
    "echo and logprobs": {"echo": True, "logprobs": 3},
    "echo of ids": {"prompt": [504, 3575, 282], "echo": True, "logprobs": 1},
    "nothing but the prompt": {"echo": True, "logprobs": 0, "max_tokens": 0},
    "stop": {"stop": [",", "."]},
    "best of one": {"best_of": 1, "suffix": None},
}


@pytest.fixture
def client(url: str) -> OpenAI:
    return OpenAI(base_url=url + "/v1", api_key="anything", max_retries=0, timeout=120)


def strict(kind: type[BaseModel], content: Any) -> Any:
    """Validate ``content`` strictly, unlike the package itself."""
    return kind.model_validate(content, strict=True)


def completion(content: Any, *, is_chunk: bool, has_echo: bool) -> Completion:
    """Validate a completion, with the two nulls that OpenAI's answers have and its package's types lack.

    They are the finish reason of a chunk that isn't the last, and the logprob of the first token of an echo.
    """
    for choice in content["choices"]:
        if is_chunk and choice["finish_reason"] is None:
            choice["finish_reason"] = "stop"
        logprobs = choice["logprobs"]
        if has_echo and logprobs and logprobs["token_logprobs"][:1] == [None]:
            logprobs["token_logprobs"][0] = 0.0
            if logprobs["top_logprobs"]:
                assert logprobs["top_logprobs"][0] is None
                logprobs["top_logprobs"][0] = {}
    return strict(Completion, content)


def events(url: str, path: str, body: dict[str, Any]) -> list[Any]:
    with httpx.stream("POST", url + path, json={**body, "stream": True}, timeout=120) as response:
        assert response.status_code == 200, response.read()
        data = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]


@pytest.mark.parametrize("name", CHATS)
def test_chat_answers_are_of_the_packages_types(url: str, model: str, name: str) -> None:
    body = {"model": model, **CHAT, **CHATS[name]}
    answer = httpx.post(url + "/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    whole = strict(ChatCompletion, answer.json())
    assert len(whole.choices) == body.get("n", 1)
    chunks = [strict(ChatCompletionChunk, event) for event in events(url, "/v1/chat/completions", body)]
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    said = {choice.index: "" for choice in whole.choices}
    for chunk in chunks:
        for choice in chunk.choices:
            said[choice.index] += choice.delta.content or ""
    if not body["temperature"]:
        assert said == {choice.index: choice.message.content for choice in whole.choices}


@pytest.mark.parametrize("name", COMPLETIONS)
def test_completions_are_of_the_packages_types(url: str, model: str, name: str) -> None:
    body = {"model": model, **COMPLETION, **COMPLETIONS[name]}
    answer = httpx.post(url + "/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    echoes = bool(body.get("echo"))
    whole = completion(answer.json(), is_chunk=False, has_echo=echoes)
    parts = events(url, "/v1/completions", body)
    chunks = [completion(part, is_chunk=True, has_echo=echoes) for part in parts]
    said = {choice.index: "" for choice in whole.choices}
    for chunk in chunks:
        for choice in chunk.choices:
            said[choice.index] += choice.text
    if not body["temperature"]:
        assert said == {choice.index: choice.text for choice in whole.choices}


def test_a_stream_ends_with_its_usage_where_that_is_asked_for(client: OpenAI, model: str) -> None:
    stream = client.chat.completions.create(model=model, **CHAT, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    last = chunks[-1]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens
    assert 0 < last.usage.completion_tokens <= 12


def test_logprobs_name_their_tokens(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, **CHAT, logprobs=True, top_logprobs=4)
    [choice] = answer.choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    shown = b"".join(bytes(token.bytes or ()) for token in choice.logprobs.content).decode()
    assert shown.removesuffix("<|im_end|>") == choice.message.content
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 4
        assert token.token == token.top_logprobs[0].token  # greedy: the likeliest is what was said
        assert bytes(token.bytes or ()).decode(errors="replace") == token.token


def test_models(client: OpenAI, model: str) -> None:
    [only] = client.models.list().data
    strict(Model, client.models.with_raw_response.retrieve(only.id).http_response.json())
    assert only.id == model
    assert only.max_model_len > 0  # type: ignore[attr-defined]


def test_errors_are_of_the_packages_classes_and_have_openais_words(client: OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "a"}])
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=model, prompt=[1] * 40_000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=model, **{**CHAT, "temperature": "hot"})
    assert wrong.value.param == "temperature"
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(model=model, **CHAT, tools=[tool])


def test_a_stream_that_is_left_is_left(client: OpenAI, model: str) -> None:
    with client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Count to 1000."}], max_tokens=500, stream=True
    ) as stream:
        came = list(itertools.islice(stream, 4))
    assert len(came) == 4
    again = client.chat.completions.create(model=model, **CHAT)
    assert again.choices[0].message.content


def test_extra_fields_and_headers_pass(client: OpenAI, model: str) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=model, **CHAT, extra_body={"top_k": 1, "min_p": 0.0}, extra_headers={"x-request-id": "from-openai"}
    )
    assert raw.headers["x-request-id"] == "from-openai"
    assert raw.parse().choices[0].message.content


RESPONSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "items": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
        "instructions": "Be brief.",
    },
    "history": {"input": [*ASK, {"role": "assistant", "content": "Paris"}, {"role": "user", "content": "Sure?"}]},
    "what is answered again": {
        "metadata": {"a": "b"},
        "user": "u",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_object"}},
    },
    "schema": {
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
        "include": ["reasoning.encrypted_content"],
    },
    "nothing kept": {"store": False, "tool_choice": "none", "tools": [{"type": "web_search"}]},
}


@pytest.mark.parametrize("name", RESPONSES)
def test_responses_are_of_the_packages_types(url: str, model: str, name: str) -> None:
    body = {"model": model, "input": ASK, "temperature": 0, "max_output_tokens": 12, **RESPONSES[name]}
    answer = httpx.post(url + "/v1/responses", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    whole = strict(Response, answer.json())
    with httpx.stream("POST", url + "/v1/responses", json={**body, "stream": True}, timeout=120) as response:
        data = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    streamed = [EVENT.validate_json(line, strict=True) for line in data]
    assert [event.sequence_number for event in streamed] == list(range(len(streamed)))
    last = streamed[-1].response
    assert (last.output_text, last.status) == (whole.output_text, whole.status)
    assert "".join(event.delta for event in streamed if event.type == "response.output_text.delta") == last.output_text


def test_a_conversation_of_responses(client: OpenAI, model: str) -> None:
    first = client.responses.create(model=model, input="Name a colour.", temperature=0, max_output_tokens=8)
    with client.responses.stream(
        model=model, input="And another.", previous_response_id=first.id, temperature=0, max_output_tokens=60
    ) as stream:
        kinds = [event.type for event in stream]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert client.responses.retrieve(first.id) == first
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as gone:
        client.responses.create(model=model, input="Why?", previous_response_id=first.id)
    assert (gone.value.param, gone.value.code) == ("previous_response_id", "previous_response_not_found")


def test_a_response_is_cancelled(client: OpenAI, model: str) -> None:
    with client.responses.create(model=model, input="Count to 1000.", max_output_tokens=500, stream=True) as stream:
        created = next(iter(stream))
        cancelled = client.responses.cancel(created.response.id)
        last = list(stream)[-1]
    assert cancelled.status == last.response.status == "cancelled"
    assert client.responses.retrieve(cancelled.id) == cancelled


@pytest.mark.parametrize("given", ["Paris", ["Paris", "Rome"], [504, 3575], [[504], [3575, 282]]])
def test_embeddings(client: OpenAI, model: str, given: Any) -> None:
    answer = client.embeddings.create(model=model, input=given)
    assert len(answer.data) == (2 if isinstance(given, list) and not isinstance(given[0], int) else 1)
    short = client.embeddings.create(model=model, input=given, dimensions=8, encoding_format="float")
    for one, other in zip(answer.data, short.data, strict=True):
        assert sum(value * value for value in one.embedding) == pytest.approx(1, abs=1e-3)
        length = sum(value * value for value in one.embedding[:8]) ** 0.5
        assert [value * length for value in other.embedding] == pytest.approx(one.embedding[:8], abs=1e-3)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens > 0
