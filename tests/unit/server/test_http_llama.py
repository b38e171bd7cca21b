"""llama-server's ``/completion``, through the real app before an engine that sends given texts."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from support.fake_engine import CACHED_TOKENS, CONTEXT_LENGTH, MAX_OUTPUT, PROMPT_TOKENS, FakeEngine, with_engine
from support.machine import limit

from pdserve.benchmark.readers import LlamaCppReader
from pdserve.messages.error_codes import OVERLOADED
from pdserve.messages.outputs import FinishReason, FinishType, ReqError, TextBatch
from pdserve.runtime.web.body import MAX_PROMPTS
from pdserve.runtime.web.errors import TOO_LONG, error_fields, llama_error
from pdserve.server.http.llama.answers import LlamaCompletion, LlamaCompletionEvent, LlamaError
from pdserve.server.http.llama.schemas import MAX_MIXED_CHARACTERS, SAMPLERS

PATH = "/completion"
WORDS = [f"w{i} " for i in range(MAX_OUTPUT)]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def ask(body: dict[str, Any], path: str = PATH, **options: Any) -> tuple[httpx.Response, FakeEngine]:
    """Send a body to an engine that answers at once."""

    async def run(engine: FakeEngine) -> tuple[httpx.Response, FakeEngine]:
        return await engine.post(path, body), engine

    return with_engine(run, served_model_name="m", **options)


def whole(body: dict[str, Any], path: str = PATH) -> tuple[Any, FakeEngine]:
    response, engine = ask(body, path)
    assert response.status_code == 200, response.text
    LlamaCompletion.model_validate_json(response.text, strict=True)
    return response.json(), engine


def streamed(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream, which are all of the declared shape."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *parts, last = response.text.split("\n\n")
    assert last == ""
    for part in parts:
        LlamaCompletionEvent.model_validate_json(part.removeprefix("data: "), strict=True)
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def refusal(body: dict[str, Any]) -> dict[str, Any]:
    response, engine = ask(body)
    assert response.status_code == 400, response.text
    assert not engine.sent
    LlamaError.model_validate_json(response.text, strict=True)
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize("path", [PATH, "/completions"])
def test_an_answer_has_content_counts_settings_and_timings(path: str) -> None:
    answer, engine = whole({"prompt": "a b", "n_predict": 3, "seed": 5, "stop": ["x"], "temperature": -1}, path)
    assert (answer["content"], answer["tokens"], answer["stop"]) == ("w0 w1 w2 ", [], True)
    assert (answer["model"], answer["prompt"]) == ("m", "a b")
    counts = ("tokens_predicted", "tokens_evaluated", "tokens_cached")
    assert [answer[name] for name in counts] == [3, PROMPT_TOKENS, CACHED_TOKENS]
    assert (answer["stop_type"], answer["stopping_word"], answer["truncated"]) == ("limit", "", False)
    settings = answer["generation_settings"]
    assert (settings["n_predict"], settings["n_ctx"], settings["seed"]) == (3, CONTEXT_LENGTH, 5)
    assert (settings["stop"], settings["temperature"]) == (["x"], 0.0)
    timings = answer["timings"]
    names = ("cache_n", "prompt_n", "predicted_n")
    assert [timings[name] for name in names] == [CACHED_TOKENS, PROMPT_TOKENS - CACHED_TOKENS, 3]
    assert engine.requests[0].sampling.max_new_tokens == 3


def test_a_stream_has_the_new_text_and_then_all_facts() -> None:
    body = {"prompt": "a", "n_predict": 3, "seed": 5, "rid": "r"}
    *pieces, last = streamed(ask({**body, "stream": True})[0])
    assert [(piece["content"], piece["tokens"]) for piece in pieces] == [(WORDS[i], [i]) for i in range(3)]
    assert [(piece["stop"], piece["tokens_predicted"]) for piece in pieces] == [(False, i + 1) for i in range(3)]
    wanted, _ = whole(body)
    wanted["generation_settings"]["stream"] = True
    assert last == {**wanted, "content": ""}


def test_the_benchmarks_reader_for_llama_server_reads_a_stream() -> None:
    reader = LlamaCppReader()
    response, _ = ask({"prompt": "a", "n_predict": 3, "stream": True, "cache_prompt": True, "ignore_eos": True})
    events = [part.removeprefix("data: ").encode() for part in response.text.split("\n\n") if part]
    assert [reader.read(event) for event in events] == [1, 1, 1, 0]
    reader.finish()
    assert (reader.prompt_tokens, reader.completion_tokens, reader.cached_tokens) == (PROMPT_TOKENS, 3, CACHED_TOKENS)


def test_tokens_come_if_they_are_asked_for() -> None:
    assert whole({"prompt": "a", "n_predict": 3, "return_tokens": True})[0]["tokens"] == [0, 1, 2]


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [
        ("a b", [("a b", None)]),
        ([5, 6], [(None, [5, 6])]),
        # The fake engine's token of a word is its length.
        ([5, "xx yyy", 6, "z"], [(None, [5, 2, 3, 6, 1])]),
        (["xx", 6], [(None, [2, 6])]),
        ({"prompt_string": "a"}, [("a", None)]),
        (["a"], [("a", None)]),
        (["a", "b"], [("a", None), ("b", None)]),
        ([[5], [6, 7]], [(None, [5]), (None, [6, 7])]),
        (
            ["a", [5, 6], {"prompt_string": "b"}, ["xx", 7], [8, "y"]],
            [("a", None), (None, [5, 6]), ("b", None), (None, [2, 7]), (None, [8, 1])],
        ),
    ],
)
def test_prompts_are_texts_token_ids_and_lists_of_both(prompt: Any, sent: list[tuple[str | None, Any]]) -> None:
    answer, engine = whole({"prompt": prompt, "n_predict": 1})
    assert [(request.text, request.input_ids) for request in engine.sent] == sent
    answers = answer if isinstance(answer, list) else [answer]
    assert [one["index"] for one in answers] == list(range(len(sent)))
    assert [one["prompt"] for one in answers] == [text or "p0 p1 " for text, _ in sent]
    assert isinstance(answer, list) == (len(sent) > 1)


def test_only_a_text_at_the_begin_of_a_mixed_prompt_gets_special_tokens() -> None:
    _, engine = whole({"prompt": [["a", 1, "b"], [2, "c"]], "n_predict": 1})
    asked = [(q.texts, q.add_special_tokens) for q in engine.questions if hasattr(q, "texts")]
    assert asked == [(["a"], None), (["b", "c"], False)]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt: is empty"),
        ([], "prompt: is empty"),
        ([[]], "prompt: is empty"),
        (["a", ""], "prompt[1]: is empty"),
        ([5, -1], "prompt[1]: "),
        ([5, {"prompt_string": "a"}], "prompt[1]: "),
        ([5, None], "prompt[1]: "),
        ([["a", "b"]], "prompt[0][0]: must be an integer"),
        ({"prompt_string": "a", "multimodal_data": ["x"]}, "prompt.multimodal_data: "),
        (["a", {"prompt_string": "a", "multimodal_data": ["x"]}], "prompt[1].multimodal_data: "),
        ([1, *["a"] * (MAX_PROMPTS + 1)], "prompt: holds 4097 texts"),
        ([1, "a" * MAX_MIXED_CHARACTERS, "b"], "prompt: holds 1048577 characters"),
        ([1, "bad"], "prompt: not encodable"),
        (5, "prompt: must be a string"),
    ],
)
def test_prompts_that_are_none_are_refused(prompt: Any, message: str) -> None:
    assert refusal({"prompt": prompt})["message"].startswith(message)


def test_several_answers_to_a_prompt_are_numbered_on() -> None:
    answers, engine = whole({"prompt": ["a", "b"], "n_cmpl": 2, "n_predict": 1})
    assert [(one["index"], one["prompt"]) for one in answers] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]
    assert [len(request.rids) for request in engine.sent] == [2, 2]
    events = streamed(ask({"prompt": ["a", "b"], "n_cmpl": 2, "n_predict": 1, "stream": True})[0])
    assert sorted(one["index"] for one in events if one["stop"]) == [0, 1, 2, 3]


def test_fields_of_sampling_reach_the_engine() -> None:
    given = {
        **{"temperature": 0.5, "top_k": 7, "top_p": 0, "min_p": 0.1, "repeat_penalty": 1.1},
        **{"presence_penalty": 0.2, "frequency_penalty": 0.3, "seed": 9, "ignore_eos": True},
        "logit_bias": [[5, 1.5], [6, False]],
    }
    _, engine = whole({"prompt": "a", **given})
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 7, 1e-9, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.1, 0.2, 0.3)
    assert (sampling.seed, sampling.ignore_eos, sampling.logit_bias) == (9, True, {5: 1.5, 6: -100.0})
    assert whole({"prompt": "a", "logit_bias": {"5": 2}})[1].requests[0].sampling.logit_bias == {5: 2.0}


@pytest.mark.parametrize(
    ("fields", "kind", "source"),
    [
        ({"grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
        ({"json_schema": SCHEMA}, "json_schema", json.dumps(SCHEMA, separators=(",", ":"))),
        ({"json_schema": {}, "grammar": ""}, "json_schema", "{}"),
    ],
)
def test_a_grammar_or_a_schema_holds(fields: dict[str, Any], kind: str, source: str) -> None:
    grammar = whole({"prompt": "a", **fields})[1].requests[0].sampling.grammar
    assert grammar is not None
    assert (grammar.kind, grammar.source, grammar.field) == (kind, source, next(iter(fields)))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"samplers": ["top_k"]}, "samplers"),
        ({"mirostat": 2}, "mirostat"),
        ({"dry_multiplier": 0.8}, "dry_multiplier"),
        ({"xtc_probability": 0.5}, "xtc_probability"),
        ({"typical_p": 0.9}, "typical_p"),
        ({"top_n_sigma": 1.0}, "top_n_sigma"),
        ({"post_sampling_probs": True}, "post_sampling_probs"),
        ({"response_fields": ["content"]}, "response_fields"),
        ({"lora": [{"id": 0, "scale": 1}]}, "lora"),
        ({"t_max_predict_ms": 5}, "t_max_predict_ms"),
        ({"n_predict": -2}, "n_predict"),
        ({"n_probs": 1000}, "n_probs"),
        ({"logit_bias": [["Hello", 1]]}, "logit_bias"),
        ({"logit_bias": [[True, 1]]}, "logit_bias"),
        ({"logit_bias": {"Hello": 1}}, "logit_bias"),
        ({"logit_bias": [[5]]}, "logit_bias"),
        ({"grammar": "root ::= a", "json_schema": SCHEMA}, "grammar"),
        ({"grammar": "root ::= a", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_what_would_change_the_answer_and_is_not_served_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = refusal({"prompt": "a", **fields})
    assert (error["param"], error["code"], error["type"]) == (param, 400, "invalid_request_error")
    assert error["message"].startswith(f"{param}: ")


def test_what_changes_no_answer_is_accepted_and_unknown_fields_are_named() -> None:
    neutral = {"mirostat": 0, "mirostat_tau": 5.0, "samplers": ["penalties", *SAMPLERS], "typical_p": 1.0, "lora": []}
    response, _ = ask({"prompt": "a", **neutral, "id_slot": 2, "n_keep": 5, "max_tokens": 3})
    assert response.headers["x-pdserve-ignored"] == "id_slot, n_keep, max_tokens;did-you-mean=n_predict"


def test_a_prompt_that_is_not_to_be_cached_has_a_namespace_of_its_own() -> None:
    keys = [whole({"prompt": "a", "cache_prompt": False, "extra_key": "k"})[1].sent[0].extra_key for _ in range(2)]
    assert len({*keys, "k"}) == 3
    assert whole({"prompt": "a", "cache_prompt": True, "extra_key": "k"})[1].sent[0].extra_key == "k"


def test_probabilities_come_with_their_alternatives() -> None:
    body = {"prompt": "a", "n_predict": 2, "n_probs": 2}
    found = whole(body)[0]["completion_probabilities"]
    assert [entry["id"] for entry in found] == [0, 1]
    first = found[0]
    assert (first["token"], first["bytes"], first["logprob"]) == ("w0 ", list(b"w0 "), -0.5)
    assert [one["id"] for one in first["top_logprobs"]] == [90, 91]
    events = streamed(ask({**body, "stream": True})[0])
    assert [entry for event in events for entry in event.get("completion_probabilities", [])] == found


def test_no_tokens_may_be_asked_for() -> None:
    answer, engine = whole({"prompt": "a", "n_predict": 0})
    assert (answer["content"], answer["tokens_predicted"], answer["truncated"]) == ("", 0, False)
    assert engine.requests[0].sampling.max_new_tokens == 1


def test_without_a_limit_an_answer_ends_with_the_context_and_says_so() -> None:
    answer, engine = whole({"prompt": "a"})
    assert (answer["truncated"], answer["stop_type"]) == (True, "limit")
    assert engine.requests[0].sampling.max_new_tokens > CONTEXT_LENGTH


def ended(finish: FinishReason, *, stream: bool = False) -> dict[str, Any]:
    """Return the last object of an answer that ends so."""

    async def run(engine: FakeEngine) -> httpx.Response:
        asking = asyncio.create_task(engine.post(PATH, {"prompt": "a", "stream": stream}))
        await engine.wait_for(lambda: bool(engine.requests))
        item = engine.text(engine.requests[0], "Red", [7], finish.type)
        item.finish = finish
        engine.client.dispatch([TextBatch([item])])
        return await asking

    response = with_engine(run, hold=True)
    if stream:
        return streamed(response)[-1]
    LlamaCompletion.model_validate_json(response.text, strict=True)
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("finish", "stop_type", "word"),
    [
        (FinishReason(FinishType.STOP, 2), "eos", ""),
        (FinishReason(FinishType.STOP, None), "eos", ""),
        (FinishReason(FinishType.STOP, "END"), "word", "END"),
        (FinishReason(FinishType.LENGTH), "limit", ""),
        (FinishReason(FinishType.ABORT, message="why"), "limit", ""),
        (FinishReason(FinishType.TIMEOUT, message="why"), "limit", ""),
    ],
)
def test_an_answer_says_how_it_ended(finish: FinishReason, stop_type: str, word: str, stream: bool) -> None:
    answer = ended(finish, stream=stream)
    assert (answer["stop_type"], answer["stopping_word"]) == (stop_type, word)
    is_served = finish.type in (FinishType.STOP, FinishType.LENGTH)
    assert answer.get("pdserve_finish") == (None if is_served else {"type": finish.type.value, "message": "why"})


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, None, "invalid_request_error"),
        (400, TOO_LONG, "exceed_context_size_error"),
        (401, None, "authentication_error"),
        (404, None, "not_found_error"),
        (429, None, "unavailable_error"),
        (500, None, "server_error"),
        (501, None, "not_supported_error"),
        (503, OVERLOADED, "unavailable_error"),
    ],
)
def test_errors_have_llama_servers_types_and_keep_what_a_router_goes_by(status: int, code: str, kind: str) -> None:
    fields = error_fields(status, "why", code=code)
    body = llama_error(fields)
    assert (body["error"]["code"], body["error"]["type"]) == (status, kind)
    assert (body["error"]["kind"], body["error"]["reason"]) == (fields["type"], fields["code"])
    # As a router does with an instance's.
    assert llama_error({"status": status, **body["error"]}) == body


def test_a_stream_that_fails_ends_with_an_error() -> None:
    async def run(engine: FakeEngine) -> httpx.Response:
        asking = asyncio.create_task(engine.post(PATH, {"prompt": "a", "stream": True}))
        await engine.wait_for(lambda: bool(engine.requests))
        (request,) = engine.requests
        engine.client.dispatch([TextBatch([engine.text(request, "Red", [7])])])
        live = engine.client.live.get(request.rid)
        async with asyncio.timeout(limit(10)):
            while live is not None and not live.choice.opened:
                await asyncio.sleep(0)
        engine.client.dispatch([ReqError(request.rid, 500, "broke")])
        return await asking

    response = with_engine(run, hold=True)
    first, last, end = response.text.split("\n\n")
    assert json.loads(first.removeprefix("data: "))["content"] == "Red"
    LlamaError.model_validate_json(last.removeprefix("data: "), strict=True)
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "broke"
    assert end == ""
