"""Embeddings, scores and ranks, through the real app before an engine that sends given vectors."""

from __future__ import annotations

import asyncio
import base64
import math
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from support.fake_engine import CACHED_TOKENS, PROMPT_TOKENS, FakeEngine, with_engine

from pdserve.messages.outputs import ReqError
from pdserve.messages.readout import MAX_LABELS, Readout
from pdserve.messages.requests import TokenizeReq
from pdserve.server.http.readouts.answers import (
    EmbeddingsAnswer,
    LabelScores,
    OllamaEmbedAnswer,
    OllamaEmbeddingsAnswer,
    PairScores,
    RerankAnswer,
)
from pdserve.server.http.readouts.relevance import QUESTION

EMBEDDINGS, SCORE, RERANK, EMBED, OLD = "/v1/embeddings", "/v1/score", "/v1/rerank", "/api/embed", "/api/embeddings"
YES, NO = 3, 2
"""Ids of the fake engine's tokens: the lengths of the words."""


def ask(
    path: str, body: dict[str, Any], *vectors: list[float], errors: tuple[ReqError, ...] = (), **options: Any
) -> tuple[httpx.Response, list[TokenizeReq]]:
    """Answer a body, and return what the engine was asked for. ``vectors``: readouts of its prompts, in order."""

    async def run(engine: FakeEngine) -> tuple[httpx.Response, list[TokenizeReq]]:
        engine.vectors, engine.errors = list(vectors), list(errors)
        return await engine.post(path, body), engine.sent

    return with_engine(run, served_model_name="m", **options)


def answered(path: str, body: dict[str, Any], *vectors: list[float], **options: Any) -> dict[str, Any]:
    response, _ = ask(path, body, *vectors, **options)
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


def refused(path: str, body: dict[str, Any]) -> dict[str, Any]:
    response, _ = ask(path, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error if isinstance(error, dict) else response.json()


def sent(path: str, body: dict[str, Any]) -> list[TokenizeReq]:
    return ask(path, body)[1]


def test_an_embedding_has_length_1() -> None:
    answer = answered(EMBEDDINGS, {"model": "m", "input": "Hello"}, [3.0, 4.0])
    EmbeddingsAnswer.model_validate_json(orjson.dumps(answer), strict=True)
    assert answer["data"] == [{"object": "embedding", "index": 0, "embedding": [0.6, 0.8]}]
    details = {"prompt_tokens_details": {"cached_tokens": CACHED_TOKENS}}
    assert answer["usage"] == {"prompt_tokens": PROMPT_TOKENS, "total_tokens": PROMPT_TOKENS, **details}


def test_a_model_that_gives_zeros_has_an_embedding_of_zeros() -> None:
    assert answered(EMBEDDINGS, {"input": "Hello"}, [0.0, 0.0])["data"][0]["embedding"] == [0.0, 0.0]


def test_one_request_for_one_token_is_sent_without_output() -> None:
    (request,) = sent(EMBEDDINGS, {"input": "Hello", "user": "u", "extra_key": "k", "rid": "r"})
    assert (request.readout, request.sampling.max_new_tokens, request.sampling.temperature) == (Readout("last"), 1, 0)
    assert (request.user, request.extra_key, request.rid, request.stream) == ("u", "k", "r", False)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([5, 6], [[5, 6]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
def test_inputs_are_texts_or_token_ids_alone_or_in_lists(given: Any, prompts: list[Any]) -> None:
    requests = sent(EMBEDDINGS, {"input": given})
    assert [request.input_ids or str(request.text) for request in requests] == prompts


def test_a_batch_is_answered_in_the_order_of_its_inputs() -> None:
    answer = answered(EMBEDDINGS, {"input": ["a", "b"]}, [1.0, 0.0], [0.0, 2.0])
    assert [(entry["index"], entry["embedding"]) for entry in answer["data"]] == [(0, [1.0, 0.0]), (1, [0.0, 1.0])]
    assert answer["usage"]["total_tokens"] == 2 * PROMPT_TOKENS


def test_base64_holds_the_float32_bytes() -> None:
    answer = answered(EMBEDDINGS, {"input": "a", "encoding_format": "base64"}, [3.0, 4.0])
    values = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
    assert values.tolist() == np.float32([0.6, 0.8]).tolist()


def test_the_first_dimensions_are_normalised_anew() -> None:
    answer = answered(EMBEDDINGS, {"input": "a", "dimensions": 2}, [3.0, 4.0, 12.0])
    assert answer["data"][0]["embedding"] == [0.6, 0.8]


def test_more_dimensions_than_the_model_has_are_refused() -> None:
    error = refused(EMBEDDINGS, {"input": "a", "dimensions": 3})
    assert error["param"] == "dimensions"
    assert "3 is above the 2 dimensions" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (EMBEDDINGS, {}, "input"),
        (EMBEDDINGS, {"input": ""}, "input"),
        (EMBEDDINGS, {"input": []}, "input"),
        (EMBEDDINGS, {"input": ["a", ""]}, "input[1]"),
        (EMBEDDINGS, {"input": [1.5]}, "input[0]"),
        (EMBEDDINGS, {"input": "a", "dimensions": 0}, "dimensions"),
        (EMBEDDINGS, {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        (EMBEDDINGS, {"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        (EMBEDDINGS, {"input": "a", "bootstrap_host": "h", "bootstrap_room": 1}, "bootstrap_host"),
        (EMBED, {"input": ["a", 5]}, "input[1]"),
        (EMBED, {}, "model"),
        (OLD, {}, "model"),
        (OLD, {"prompt": 5}, "prompt"),
        (SCORE, {}, "query"),
        (SCORE, {"query": "a", "items": ["b"]}, "label_token_ids"),
        (SCORE, {"query": "a", "items": ["b"], "label_token_ids": []}, "label_token_ids"),
        (SCORE, {"query": "a", "items": ["b"], "label_token_ids": [1] * (MAX_LABELS + 1)}, "label_token_ids"),
        (SCORE, {"query": "a", "items": [5], "label_token_ids": [1]}, "items"),
        (SCORE, {"query": "a", "items": [], "label_token_ids": [1]}, "items"),
        (SCORE, {"text_1": "a"}, "text_2"),
        (SCORE, {"text_1": "a", "text_2": []}, "text_2"),
        (SCORE, {"text_1": ["a", "b"], "text_2": ["c"]}, "text_2"),
        (SCORE, {"text_1": "a", "text_2": "b", "query": "c"}, "query"),
        (RERANK, {"query": "a"}, "documents"),
        (RERANK, {"query": "a", "documents": []}, "documents"),
        (RERANK, {"query": "", "documents": ["b"]}, "query"),
        (RERANK, {"query": "a", "documents": ["b", {"title": "c"}]}, "documents[1].text"),
        (RERANK, {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
    ],
)
def test_a_bad_field_is_named(path: str, body: dict[str, Any], param: str) -> None:
    assert refused(path, body)["param"] == param


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (SCORE, {"query": "q" * 300_000, "items": ["a"] * 100, "label_token_ids": [1]}),
        (SCORE, {"query": [7] * 300_000, "items": [[5]] * 100, "label_token_ids": [1]}),
        (SCORE, {"text_1": "q" * 300_000, "text_2": ["a"] * 100}),
        (RERANK, {"query": "q" * 300_000, "documents": ["a"] * 100}),
    ],
)
def test_a_query_is_not_multiplied_to_any_size(path: str, body: dict[str, Any]) -> None:
    response, requests = ask(path, body)
    assert (response.status_code, requests) == (413, [])
    assert "split them" in response.json()["error"]["message"]


def test_a_long_text_of_one_pair_does_not_count_for_the_others() -> None:
    texts = ["q" * 300_000, *["a"] * 99]
    assert len(sent(SCORE, {"text_1": texts, "text_2": texts})) == 100


def test_one_answer_has_at_most_2048_embeddings() -> None:
    for path, name in ((EMBEDDINGS, "message"), (EMBED, "error")):
        assert "the limit is 2048" in refused(path, {"input": ["a"] * 2049})[name]


def test_another_model_is_not_found() -> None:
    assert [ask(path, {"model": "x", "input": "a"})[0].status_code for path in (EMBEDDINGS, EMBED)] == [404, 404]


def test_the_engines_errors_have_the_clients_names() -> None:
    too_long = ReqError("", 400, "the prompt has too many tokens", field="text", code="context_length_exceeded")
    for path, body, param in (
        (EMBEDDINGS, {"input": "a"}, "input"),
        (OLD, {"prompt": "a"}, "prompt"),
        (SCORE, {"query": "a", "items": ["b"], "label_token_ids": [1]}, "items"),
    ):
        response, _ = ask(path, body, errors=(too_long,))
        content = response.json()
        assert response.status_code == 400
        assert (content["error"] if isinstance(content["error"], dict) else content)["param"] == param


def test_an_aborted_request_has_no_embedding() -> None:
    async def run(engine: FakeEngine) -> httpx.Response:
        asking = asyncio.create_task(engine.post(EMBEDDINGS, {"input": "a", "rid": "r"}))
        await engine.wait_for(lambda: bool(engine.requests))
        await engine.post("/abort_request", {"rid": "r"})
        return await asking

    response = with_engine(run, hold=True)
    assert response.status_code == 409
    assert "ended before" in response.json()["error"]["message"]


def test_ollamas_embeddings() -> None:
    answer = answered(EMBED, {"model": "m:latest", "input": ["a", "b"]}, [3.0, 4.0], [1.0, 0.0])
    OllamaEmbedAnswer.model_validate_json(orjson.dumps(answer), strict=True)
    assert (answer["model"], answer["embeddings"]) == ("m:latest", [[0.6, 0.8], [1.0, 0.0]])
    assert (answer["prompt_eval_count"], answer["total_duration"] > 0) == (2 * PROMPT_TOKENS, True)
    assert answered(EMBED, {"input": "a", "dimensions": 1}, [3.0, 4.0])["embeddings"] == [[1.0]]
    old = answered(OLD, {"model": "m", "prompt": "a"}, [3.0, 4.0])
    OllamaEmbeddingsAnswer.model_validate(old, strict=True)
    assert old == {"embedding": [0.6, 0.8]}


def test_ollamas_texts_are_truncated_unless_the_body_says_otherwise() -> None:
    for body, truncate in (({}, True), ({"truncate": None}, True), ({"truncate": False}, False)):
        (request,) = sent(EMBED, {"input": "a", **body})
        assert request.readout == Readout("last", truncate=truncate)
    assert not sent(OLD, {"prompt": "a"})[0].readout.truncate


def test_ollamas_embeddings_of_nothing_only_say_that_the_model_is_there() -> None:
    for given in ({}, {"input": ""}, {"input": []}):
        assert answered(EMBED, {"model": "m", **given})["embeddings"] == []
    assert answered(OLD, {"model": "m"}) == {"embedding": []}


def test_ollamas_errors_have_its_shape() -> None:
    response, _ = ask(EMBED, {"input": 5})
    assert response.status_code == 400
    assert isinstance(response.json()["error"], str)


def test_labels_are_scored_after_the_query_and_each_item() -> None:
    body = {"query": "q ", "items": ["a", "b"], "label_token_ids": [5, 9]}
    requests = sent(SCORE, body)
    assert [str(request.text) for request in requests] == ["q a", "q b"]
    assert {request.readout for request in requests} == {Readout("labels", (5, 9))}
    assert [str(request.text) for request in sent(SCORE, body | {"item_first": True})] == ["aq ", "bq "]
    ids = sent(SCORE, {"query": [1], "items": [[2], [3, 4]], "label_token_ids": [5]})
    assert [request.input_ids for request in ids] == [[1, 2], [1, 3, 4]]


def test_scores_are_probabilities_in_the_vocabulary_or_among_the_labels() -> None:
    body = {"query": "q", "items": "a", "label_token_ids": [5, 9]}
    logs = [math.log(0.3), math.log(0.1)]
    answer = answered(SCORE, body, logs)
    LabelScores.model_validate_json(orjson.dumps(answer), strict=True)
    assert answer["scores"] == [pytest.approx([0.3, 0.1])]
    assert answered(SCORE, body | {"apply_softmax": True}, logs)["scores"] == [pytest.approx([0.75, 0.25])]
    tiny = answered(SCORE, body | {"apply_softmax": True}, [-2000.0, -2000.0])["scores"]
    assert tiny == [[0.5, 0.5]]


def test_pairs_of_texts_are_scored_by_yes_beside_no() -> None:
    body = {"text_1": "q", "text_2": ["a", "b"]}
    answer = answered(SCORE, body, [math.log(0.3), math.log(0.1)], [math.log(0.1), math.log(0.1)])
    PairScores.model_validate_json(orjson.dumps(answer), strict=True)
    assert [entry["score"] for entry in answer["data"]] == pytest.approx([0.75, 0.5])
    requests = sent(SCORE, body | {"instruction": "Alike?"})
    assert {request.readout for request in requests} == {Readout("labels", (YES, NO))}
    texts = [str(request.chat.messages[0].content) for request in requests]
    assert all(text.startswith("Alike?") and "q" in text for text in texts)
    assert len(sent(SCORE, {"text_1": ["a", "b"], "text_2": ["c", "d"]})) == 2


def test_documents_are_ranked_best_first() -> None:
    body = {"query": "q", "documents": ["a", {"text": "b"}, "c"]}
    vectors = [math.log(0.1), math.log(0.3)], [math.log(0.3), math.log(0.1)], [math.log(0.1), math.log(0.1)]
    answer = answered(RERANK, body, *vectors)
    RerankAnswer.model_validate_json(orjson.dumps(answer), strict=True)
    results = answer["results"]
    assert [(result["index"], result["document"]["text"]) for result in results] == [(1, "b"), (2, "c"), (0, "a")]
    assert [result["relevance_score"] for result in results] == pytest.approx([0.75, 0.5, 0.25])
    short = answered(RERANK, body | {"top_n": 1, "return_documents": False}, *vectors)["results"]
    assert short == [{"index": 1, "relevance_score": pytest.approx(0.75)}]
    chat = sent(RERANK, body)[0].chat
    assert str(chat.messages[0].content).startswith(QUESTION)
    assert chat.template_args == {"enable_thinking": False}
