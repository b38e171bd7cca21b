"""What odd but harmless bodies are taken for: each with its status, and what the engine is asked.

If OpenAI and vLLM differ, the comment says which of them this server follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.fake_engine import FakeEngine, with_engine

from pdserve.messages.outputs import ReqError
from pdserve.messages.requests import TokenizeReq

USER = {"role": "user", "content": "hi"}
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
REQUIRED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    COMPLETIONS: {"prompt": "a"},
    GENERATE: {"text": "a"},
}
PATHS = tuple(REQUIRED)


def body_of(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return a body with sampling ``fields`` where the API has them, by its names."""
    if path != GENERATE:
        return {**REQUIRED[path], **fields}
    names = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
    return {**REQUIRED[path], "sampling_params": {names.get(name, name): value for name, value in fields.items()}}


class Front:
    """One app in front of a fake engine, for every case."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self._engine = FakeEngine()

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """Return the answer. The requests to the engine are recorded anew."""
        self._engine.requests.clear()
        return self._runner.run(self._engine.post(path, body))

    def asked(self, path: str, body: dict[str, Any]) -> list[TokenizeReq]:
        """Return the requests to the engine for a body that is served, and of which nothing is ignored."""
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        assert "x-pdserve-ignored" not in response.headers
        return list(self._engine.requests)

    def error(self, path: str, body: dict[str, Any], status: int = 400) -> dict[str, Any]:
        """Return the error of a body that is refused."""
        response = self.post(path, body)
        assert response.status_code == status, response.text
        assert not self._engine.requests
        error: dict[str, Any] = response.json()["error"]
        assert (error["type"], error["status"]) == ("invalid_request_error", status)
        return error


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with asyncio.Runner() as runner:
        yield Front(runner)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"top_k": 0}, "top_k", -1),  # vLLM, llama.cpp, transformers
        ({"top_k": -1}, "top_k", -1),
        ({"top_p": 0}, "top_p", 1e-9),  # OpenAI, llama.cpp: the most probable token
        ({"top_k": 5.0}, "top_k", 5),
        ({"max_tokens": 10.0}, "max_new_tokens", 10),
        ({"min_tokens": 2.0, "max_tokens": 4}, "min_new_tokens", 2),
        ({"seed": 7.0}, "seed", 7),
        ({"seed": -2}, "seed", 2**63 - 2),  # the low 63 bits
        ({"seed": 2**63 - 1}, "seed", 2**63 - 1),
        ({"stop": None}, "stop", ()),
        ({"stop": ""}, "stop", ()),
        ({"stop": []}, "stop", ()),
        ({"stop": ["", "a", ""]}, "stop", ("a",)),
        ({"stop": "ab"}, "stop", ("ab",)),
        ({"temperature": None}, "temperature", 1.0),
        ({"temperature": 1}, "temperature", 1.0),
        ({"temperature": 0}, "temperature", 0.0),
        ({"presence_penalty": -2}, "presence_penalty", -2.0),
        ({"logit_bias": {"5": -100, "6": 100.0}}, "logit_bias", {5: -100.0, 6: 100.0}),
        ({"logit_bias": None}, "logit_bias", {}),
        ({"stop_token_ids": None}, "stop_token_ids", ()),
    ],
)
def test_sampling_fields_mean_the_same_in_every_api(
    front: Front, path: str, fields: dict[str, Any], name: str, value: Any
) -> None:
    [request] = front.asked(path, body_of(path, fields))
    assert getattr(request.sampling, name) == value


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": True}, "top_k"),
        ({"max_tokens": "10"}, "max_tokens"),  # as OpenAI; vLLM takes it
        ({"max_tokens": 1e300}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": "0.7"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"logit_bias": {"5": 100.5}}, "logit_bias.5"),
        ({"logit_bias": {"5": -101}}, "logit_bias.5"),
        ({"logit_bias": {"5": "1"}}, "logit_bias.5"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1.0": 1}}, "logit_bias"),
        ({"logit_bias": {"²": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 50: 1}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"stop": ["a"] * 33}, "stop"),
        ({"n": 0}, "n"),
        ({"n": "2"}, "n"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"min_tokens": 9, "max_tokens": 4}, "min_tokens"),
    ],
)
def test_what_can_not_be_meant_is_refused_by_name_in_every_api(
    front: Front, path: str, fields: dict[str, Any], param: str
) -> None:
    names = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
    error = front.error(path, body_of(path, fields))
    assert error["param"] == (f"sampling_params.{names.get(param, param)}" if path == GENERATE else param)
    assert error["message"].startswith(f"{error['param']}: ")


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids", "stop"])
@pytest.mark.parametrize("path", PATHS)
def test_what_only_the_tokenizer_knows_is_refused_by_the_clients_name_of_it(path: str, field: str) -> None:
    async def run(engine: FakeEngine) -> dict[str, Any]:
        engine.errors = [ReqError("", 400, "token id 512 is not in the model's vocabulary", field=field)]
        error: dict[str, Any] = (await engine.post(path, REQUIRED[path])).json()["error"]
        return error

    error = with_engine(run)
    assert (error["status"], error["param"]) == (400, f"sampling_params.{field}" if path == GENERATE else field)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fields", [{}, {"seed": None}, {"seed": -1}, {"seed": -1.0}])
def test_no_seed_and_minus_one_draw_another_each_time(front: Front, path: str, fields: dict[str, Any]) -> None:
    seeds = {front.asked(path, body_of(path, fields))[0].sampling.seed for _ in range(4)}
    assert len(seeds) == 4


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fields", [{"best_of": 1}, {"n": 2, "best_of": 2}, {"n": 2, "best_of": 1}, {"n": None}])
def test_best_of_is_taken_where_nothing_would_be_thrown_away(front: Front, path: str, fields: dict[str, Any]) -> None:
    assert front.asked(path, body_of(path, fields))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "fields",
    [
        {"model": ""},
        {"model": None},
        {"model": "default"},
        {"user": "u" * 5000},
        {"stream_options": {}},
        {"stream_options": None},
        {"stream_options": {"include_usage": False}},
        {"stream": None},
        {"metadata": {"a": "b"}, "safety_identifier": "s"},
        {"response_format": {"type": "text"}},
        {"logprobs": False},
        {"logprobs": None},
        {"echo": False},
        {"suffix": None} | {"top_p": None},
    ],
)
def test_what_asks_for_nothing_is_accepted(front: Front, path: str, fields: dict[str, Any]) -> None:
    front.asked(path, {**REQUIRED[path], **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tools": None, "tool_choice": "none"},
        {"tool_choice": "auto", "parallel_tool_calls": True},
        {"functions": [], "function_call": "none"},
        {"logprobs": True},
        {"logprobs": True, "top_logprobs": 0},
        {"top_logprobs": 2.0, "logprobs": True},
        {"top_logprobs": 0},
        {"reasoning_effort": "low"},
        {"modalities": ["text"]},
        {"chat_template_kwargs": {"tools": [], "enable_thinking": True}},
        {"max_tokens": 5, "max_completion_tokens": 5.0},
    ],
)
def test_what_asks_a_chat_for_nothing_is_accepted(front: Front, fields: dict[str, Any]) -> None:
    front.asked(CHAT, {"messages": [USER], **fields})


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "fields",
    [
        {"store": True},
        {"service_tier": "flex"},
        {"prompt_cache_key": "k"},
        {"prompt_cache_retention": "24h"},
        *({"verbosity": "low"}, {"prediction": {"type": "content", "content": "x"}}),
    ],
)
def test_fields_without_effect_are_ignored_and_named(front: Front, path: str, fields: dict[str, Any]) -> None:
    response = front.post(path, {**REQUIRED[path], **fields})
    assert (response.status_code, response.headers["x-pdserve-ignored"]) == (200, next(iter(fields)))


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"max_tokens": 0}, "max_tokens"),  # as OpenAI
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        (CHAT, {"logprobs": 2}, "logprobs"),
        (CHAT, {"chat_template_kwargs": {"tools": [{"type": "function"}]}}, "chat_template_kwargs"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),  # as OpenAI and vLLM
        (COMPLETIONS, {"logprobs": True}, "logprobs"),
        (COMPLETIONS, {"suffix": "x"}, "suffix"),
        ("/tokenize", {"messages": [USER], "chat_template_kwargs": {"tools": [{}]}}, "chat_template_kwargs"),
    ],
)
def test_what_would_change_the_answer_is_refused(front: Front, path: str, fields: dict[str, Any], param: str) -> None:
    assert front.error(path, {**REQUIRED.get(path, {}), **fields})["param"] == param


@pytest.mark.parametrize("fields", [{"max_tokens": 0}, {"max_tokens": 0, "echo": True, "logprobs": 1}])
def test_a_completion_of_no_tokens_is_served(front: Front, fields: dict[str, Any]) -> None:
    front.asked(COMPLETIONS, {"prompt": "a", **fields})


def test_another_model_is_a_404(front: Front) -> None:
    error = front.error(CHAT, {"messages": [USER], "model": "gpt-4"}, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_users_with_long_names_are_told_apart(front: Front) -> None:
    names = {front.asked(CHAT, {"messages": [USER], "user": "u" * 5000 + end})[0].user for end in "ab"}
    assert len(names) == 2
    assert max(map(len, names)) <= 256


def test_a_list_of_one_prompt_is_a_batch_of_one(front: Front) -> None:
    for prompt in (["a"], [[1, 2]]):
        [request] = front.asked(COMPLETIONS, {"prompt": prompt})
        assert (request.text or request.input_ids) == prompt[0]


@pytest.mark.parametrize("field", ["priority", "timeout_s", "user"])
def test_terms_are_one_value_for_the_whole_body(front: Front, field: str) -> None:
    """As in SGLang; docs/http-api.md says which fields may be lists."""
    assert front.error(GENERATE, {"text": ["a", "b"], field: [1, 2]})["param"] == field
