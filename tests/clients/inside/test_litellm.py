"""litellm, through the provider that it has for servers of this kind."""

from __future__ import annotations

import litellm
import pytest

ASK = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.mark.parametrize("provider", ["hosted_vllm", "openai"])
def test_completion_and_stream(url: str, model: str, provider: str) -> None:
    common = {
        "model": f"{provider}/{model}", "api_base": url + "/v1", "api_key": "anything", "messages": ASK,
        "max_tokens": 12, "temperature": 0, "num_retries": 0,
    }  # fmt: skip
    whole = litellm.completion(**common)
    assert "Paris" in whole.choices[0].message.content
    assert whole.usage.completion_tokens > 0
    chunks = list(litellm.completion(**common, stream=True, stream_options={"include_usage": True}))
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == whole.choices[0].message.content


def test_errors_have_litellms_classes(url: str, model: str) -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(model="openai/other", api_base=url + "/v1", api_key="x", messages=ASK, num_retries=0)
    long = [{"role": "user", "content": "word " * 20_000}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(model=f"openai/{model}", api_base=url + "/v1", api_key="x", messages=long, num_retries=0)
