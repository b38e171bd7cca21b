"""Structured output of a random model is the same on one instance and on a pair, alone, together, and retracted."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
from support.processes import Launched, Pair

KINDS: tuple[dict[str, Any], ...] = (
    {"type": "string", "maxLength": 12},
    {"type": "integer", "minimum": 0, "maximum": 9999},
    {"type": "boolean"},
    {"enum": ["red", "green", 7, None]},
    {"type": "array", "items": {"type": "integer", "maximum": 99, "minimum": 0}, "maxItems": 3},
)


def schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """Return a random schema of an object."""
    names = rng.sample(["id", "name", "tags", "größe", "a b", "nested", "x"], rng.randint(1, 4))
    kinds = [schema(rng, depth - 1) if depth and rng.random() < 0.3 else rng.choice(KINDS) for _ in names]
    required = [name for name in names if rng.random() < 0.7]
    properties = dict(zip(names, kinds, strict=True))
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def body(number: int) -> dict[str, Any]:
    """Return a request with a schema of its own."""
    rng = random.Random(number)
    prompt = [rng.randrange(100, 40000) for _ in range(rng.randint(1, 90))]
    params = {
        "json_schema": schema(rng),
        "max_new_tokens": 300,
        "temperature": rng.choice([0.0, 1.0]),
        "sampling_seed": number,
    }
    return {"input_ids": prompt, "sampling_params": params}


def answers(server: Launched, numbers: range, at_once: int) -> list[list[int]]:
    """Return the tokens of each answer; check that the complete ones match."""

    def ask(number: int) -> list[int]:
        request = body(number)
        response = server.post("/generate", request)
        assert response.status_code == 200, response.text
        answer = response.json()
        if answer["meta_info"]["finish_reason"]["type"] == "stop":
            jsonschema.validate(json.loads(answer["text"]), request["sampling_params"]["json_schema"])
        return answer["output_ids"]

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(ask, numbers))


@pytest.fixture(scope="module")
def alone_answers(small_pair: Pair) -> list[list[int]]:
    """What one instance answers, one request at a time: a prefill computes by itself what it alone is asked."""
    found = answers(small_pair.prefill, range(24), 1)
    assert small_pair.prefill.post("/flush_cache", {}).status_code == 200
    return found


def test_a_pair_answers_as_one_instance(alone_answers: list[list[int]], small_pair: Pair) -> None:
    assert answers(small_pair.router, range(24), 4) == alone_answers


def test_requests_beside_each_other_answer_as_alone(alone_answers: list[list[int]], small_pair: Pair) -> None:
    assert answers(small_pair.prefill, range(24), 16) == alone_answers


def test_retracted_requests_answer_as_alone(alone_answers: list[list[int]], small_pair: Pair) -> None:
    assert answers(small_pair.router, range(24), 24) == alone_answers


def test_most_answers_are_complete(alone_answers: list[list[int]]) -> None:
    assert sum(len(tokens) < 300 for tokens in alone_answers) >= 16
