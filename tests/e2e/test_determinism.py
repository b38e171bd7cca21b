"""The promise of docs/determinism.md: a request's tokens and log-probabilities are its own, to the last bit.

A server that does nothing else answers random requests: one at a time, whole prompts, no cache. Any other way to answer
them has to give the same, on the same processor.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.processes import ONE_THREAD, Launched, launched, pd_pair

BFLOAT16 = ("--dtype", "bfloat16", "--quantization", "none")
BLOCKS = ("--dtype", "bfloat16", "--quantization", "gguf")
REQUESTS = 15
MANY = 200
BOLD = ("--schedule-conservativeness", "0.01", "--itl-budget-ms", "0")
"""Requests are admitted until their prompts fill the pool, however long steps take on this machine."""
SMALL_POOL = ("--max-total-tokens", "1280", *BOLD, "--max-running-requests", "32")
"""The longest request is four fifths of it."""

LONGEST_SECONDS = 600.0

pytestmark = pytest.mark.timeout(LONGEST_SECONDS)


def requests(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Draw prompts of one to some hundreds of tokens, sampled in every way. Some of them begin alike."""
    rng = random.Random(seed)
    openings = [[rng.randrange(100, 40_000) for _ in range(length)] for length in (33, 160, 400)]
    made = []
    for number in range(count):
        opening = rng.choice([[], [], *openings])
        ids = opening + [rng.randrange(100, 40_000) for _ in range(rng.choice([1, 7, 40, 130, rng.randrange(1, 500)]))]
        params = {"max_new_tokens": rng.choice([rng.randrange(1, 40), 120]), "ignore_eos": rng.random() < 0.7}
        params["temperature"] = rng.choice([0, 0.6, 1.0, 1.4])
        params |= rng.choice([{}, {"top_p": 0.8}, {"top_k": 20}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.9}])
        params |= rng.choice([{}, {}, {"frequency_penalty": 0.4}, {"repetition_penalty": 1.2}])
        sampled = {"sampling_params": params | {"sampling_seed": number}}
        made.append({"input_ids": ids, "return_logprob": True, "top_logprobs_num": rng.choice([0, 3])} | sampled)
    return made


def essence(answer: dict[str, Any]) -> tuple[Any, ...]:
    """Return what must not differ: tokens, how it ended, log-probabilities as the JSON has them."""
    meta = answer["meta_info"]
    logprobs = [meta["output_token_logprobs"], meta.get("output_top_logprobs")]
    return answer["output_ids"], meta["finish_reason"], logprobs


def answers(server: Launched, bodies: list[dict[str, Any]], at_once: int) -> list[tuple[Any, ...]]:
    with ThreadPoolExecutor(at_once) as pool:
        return [essence(answer) for answer in pool.map(lambda body: server.generate(**body), bodies)]


def answers_of_a_batch(server: Launched, bodies: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return the answers of one request with all prompts, so they arrive together however busy the machine is."""
    columns = {key: [body[key] for body in bodies] for key in bodies[0]}
    response = server.post("/generate", columns, LONGEST_SECONDS)
    assert response.status_code == 200, response.text
    return [essence(answer) for answer in response.json()]


def assert_same(got: list[tuple[Any, ...]], alone: list[tuple[Any, ...]]) -> None:
    different = [number for number, (one, other) in enumerate(zip(got, alone, strict=True)) if one != other]
    assert not different, f"{len(different)} of {len(alone)}; the first: {got[different[0]]}\n{alone[different[0]]}"


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((), id="tiny"),
        pytest.param(BFLOAT16, id="bfloat16", marks=pytest.mark.slow),
        pytest.param(BLOCKS, id="gguf", marks=pytest.mark.slow),
    ],
)
def kind(request, tiny_args) -> tuple[str, ...]:
    """Options of the model: a tiny one in bfloat16, or the real one."""
    return request.param or (*tiny_args[:-2], "--dtype", "bfloat16")


@pytest.fixture(
    scope="module",
    # Many take more than ten minutes on two cores: a campaign.
    params=[REQUESTS, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
def bodies(request) -> list[dict[str, Any]]:
    return requests(request.param)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, kind, bodies) -> Iterator[list[tuple[Any, ...]]]:
    args = (*kind, *ONE_THREAD, "--disable-radix-cache", "--chunked-prefill-size", "-1")
    with launched(tmp_path_factory.mktemp("alone"), "alone", "server", *args) as server:
        server.wait_healthy()
        yield answers(server, bodies, 1)


def threads(bodies: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return options for all cores for many requests, unless other tests run at the same time.

    A team of threads waits for its slowest at every barrier.
    """
    return () if len(bodies) == MANY and "PYTEST_XDIST_WORKER" not in os.environ else ONE_THREAD


def test_in_batches_in_pieces_and_retracted(tmp_path, kind, bodies, alone):
    args = (*kind, *threads(bodies), "--chunked-prefill-size", "48", "--page-size", "16", *SMALL_POOL)
    with launched(tmp_path, "batches", "server", *args) as server:
        server.wait_healthy()
        assert_same(answers_of_a_batch(server, bodies), alone)
        assert server.info()["retractions"] > 0


@pytest.mark.slow
def test_by_a_pair(tmp_path, kind, bodies, alone):
    with pd_pair(tmp_path, "shm", *kind, "--disaggregation-threshold", "always") as pair:
        assert_same(answers(pair.router, bodies, 12), alone)
        pair.assert_all_returned()


@pytest.mark.slow
def test_from_the_tiers(tmp_path, kind, bodies, alone):
    args = (*kind, *threads(bodies), *SMALL_POOL, "--enable-hierarchical-cache", "--hicache-size", "1")
    with launched(tmp_path, "tiers", "server", *args) as server:
        server.wait_healthy()
        assert_same(answers(server, bodies, 8), alone)
        assert_same(answers(server, bodies[::-1], 8), alone[::-1])
        assert server.info()["tiers"]["loaded"] > 0
