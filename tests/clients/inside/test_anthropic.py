"""The anthropic package: messages, streams and counts, each answer in the package's own types."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from pydantic import BaseModel, TypeAdapter

ASK = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
MESSAGE: dict[str, Any] = {"messages": ASK, "temperature": 0, "max_tokens": 12}
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)

MESSAGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "a system's word": {"system": "Be brief."},
    "a system's blocks": {"system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]},
    "blocks": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
    "sampling": {"temperature": 1, "top_p": 0.9, "top_k": 20},
    "a stop sequence": {"stop_sequences": ["a", "e"]},
    "the beginning of the answer": {"messages": [*ASK, {"role": "assistant", "content": "It is"}]},
    "thinking": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    "what changes nothing": {"metadata": {"user_id": "u"}, "service_tier": "auto"},
    "history": {"messages": [*ASK, {"role": "assistant", "content": "Paris"}, {"role": "user", "content": "Sure?"}]},
}


SAMPLING = ("temperature", "top_p", "top_k")


def given(body: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the arguments by which the package sends ``body``. It has none for sampling."""
    whole = {**body, **more}
    extra = {name: whole.pop(name) for name in SAMPLING if name in whole}
    return {**whole, "extra_body": extra}


@pytest.fixture
def client(url: str) -> Anthropic:
    return Anthropic(base_url=url, api_key="anything", max_retries=0, timeout=120)


def length(message: Message) -> int:
    """Return the number of the prompt's tokens."""
    return message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def strict(kind: type[BaseModel], content: bytes) -> Any:
    """Validate ``content`` strictly, unlike the package itself."""
    return kind.model_validate_json(content, strict=True)


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_are_of_the_packages_types(url: str, model: str, client: Anthropic, name: str) -> None:
    body = {"model": model, **MESSAGE, **MESSAGES[name]}
    answer = httpx.post(url + "/v1/messages", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    whole = strict(Message, answer.content)
    with httpx.stream("POST", url + "/v1/messages", json={**body, "stream": True}, timeout=120) as response:
        data = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    for event in data:
        if json.loads(event)["type"] != "ping":  # which the package's types leave out
            EVENT.validate_json(event, strict=True)
    with client.messages.stream(**given(body)) as stream:
        added_up = stream.get_final_message()
    if not body["temperature"]:
        assert [block.text for block in added_up.content] == [block.text for block in whole.content]
        assert (added_up.stop_reason, added_up.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert length(added_up) == length(whole)
    if name == "a stop sequence":
        assert (whole.stop_reason, whole.stop_sequence in ("a", "e")) == ("stop_sequence", True)


def test_a_counted_prompt_is_as_long_as_an_answered_one(client: Anthropic, model: str) -> None:
    raw = client.messages.with_raw_response.count_tokens(model=model, messages=ASK, system="Be brief.")
    strict(MessageTokensCount, raw.http_response.content)
    answer = client.messages.create(**given(MESSAGE, model=model, system="Be brief."))
    assert raw.parse().input_tokens == length(answer)


def test_a_repeated_prompt_is_cached(client: Anthropic, model: str) -> None:
    words = " ".join(map(str, range(100)))
    body = {**MESSAGE, "model": model, "messages": [{"role": "user", "content": f"Add up: {words}"}]}
    first = client.messages.create(**given(body))
    with client.messages.stream(**given(body)) as stream:
        begun = next(event for event in stream if event.type == "message_start").message
    assert begun.usage.cache_read_input_tokens > 100
    assert begun.usage.input_tokens < first.usage.input_tokens
    assert length(begun) == length(first)


def test_errors_are_of_the_packages_classes(client: Anthropic, model: str) -> None:
    with pytest.raises(anthropic.NotFoundError, match="claude-9"):
        client.messages.create(**given(MESSAGE, model="claude-9"))
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**given(MESSAGE, model=model, messages=[{"role": "user", "content": "a " * 9_000}]))
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa=="}}
    with pytest.raises(anthropic.BadRequestError, match="image") as refused:
        client.messages.create(**given(MESSAGE, model=model, messages=[{"role": "user", "content": [image]}]))
    assert refused.value.body["error"]["type"] == "invalid_request_error"


def test_betas_pass(client: Anthropic, model: str) -> None:
    answer = client.beta.messages.create(
        **given(MESSAGE, model=model),
        betas=["context-management-2025-06-27"],
        context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
    )
    assert answer.content[0].type == "text"
