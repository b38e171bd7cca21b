"""``--disaggregation-threshold`` decides which instance computes a prompt. Answers are the same."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from support.machine import limit
from support.processes import Launched, freeze, pd_pair, wait_until
from support.scrape import Page

SHORT, LONG = 24, 1400
FAMILIES = (
    "pdserve_prompt_places_total",
    "pdserve_first_token_foreseen_seconds_total",
    "pdserve_first_token_came_seconds_total",
)
SLOW_BESIDE_STREAMS = ("--itl-budget-ms", "0", "--mixed-chunk-size", "16")
"""Beside a stream, a decode computes so few tokens a step that a long prompt is sooner done elsewhere."""


def body(ids: list[int], tokens: int = 6) -> dict:
    return {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}}


def prompt(number: int, length: int) -> list[int]:
    return [(number * 7919 + i * 31) % 40000 + 100 for i in range(length)]


def places(decode: Launched) -> tuple[int, int]:
    choices = decode.info()["disaggregation"]["choices"]
    return choices["here"]["prompts"], choices["there"]["prompts"]


def of_metrics(decode: Launched, name: str) -> bool:
    """Return whether a metric has counts for both places."""
    page = Page(decode.client.get(decode.url + "/metrics").text)
    return all(page.total(name, place=place) > 0 for place in ("here", "there"))


def computed(server: Launched) -> int:
    return server.info()["counters"]["prompt_tokens"]


@pytest.fixture(scope="module")
def expected(alone) -> dict[tuple[int, ...], list[int]]:
    prompts = [prompt(i, length) for i in range(8) for length in (SHORT, LONG)]
    return {tuple(ids): alone.generate(**body(ids))["output_ids"] for ids in prompts}


@pytest.mark.slow
def test_a_number_of_tokens_is_the_border(tmp_path, tiny_args, expected):
    """``tests/unit/disaggregation/test_placement_policy.py`` has the rule, and simulated pairs that follow it."""
    with pd_pair(tmp_path, "shm", *tiny_args, "--disaggregation-threshold", "100") as pair:
        for ids in (prompt(0, SHORT), prompt(0, LONG), prompt(1, SHORT), prompt(1, LONG)):
            assert pair.router.generate(**body(ids))["output_ids"] == expected[tuple(ids)]
        assert computed(pair.prefill) == 2 * LONG
        assert computed(pair.decode) == 2 * SHORT
        # All but the last tokens of it are cached there: too little is left to be computed elsewhere.
        again = prompt(1, LONG)
        assert pair.router.generate(**body(again))["output_ids"] == expected[tuple(again)]
        assert places(pair.decode) == (3, 2)
        pair.assert_all_returned()
        legs = Page(pair.prefill.client.get(pair.prefill.url + "/metrics").text)
        outcomes = {
            o: legs.total("pdserve_prefill_legs_finished_total", outcome=o) for o in ("handed_over", "declined")
        }
        assert outcomes == {"handed_over": 2, "declined": 3}
        answers = Page(pair.decode.client.get(pair.decode.url + "/metrics").text)
        assert answers.total("pdserve_request_transfer_seconds_count") == 2


@pytest.mark.slow
def test_by_itself_it_is_here_or_there_by_who_is_busy(tmp_path, tiny_args, expected):
    auto = ("--disaggregation-threshold", "auto")
    with (
        pd_pair(
            *(tmp_path, "tcp", *tiny_args, *auto),
            decode_args=SLOW_BESIDE_STREAMS,
            prefill_args=("--disable-radix-cache",),  # so that it begins nothing before it is asked
        ) as pair,
        ThreadPoolExecutor(16) as pool,
    ):
        pair.router.generate(**body(prompt(0, SHORT)))  # wherever: it brings the link up
        at_first = places(pair.decode)
        streams = [pool.submit(pair.decode.generate, **body(prompt(9 + i, SHORT), 900)) for i in range(4)]
        wait_until(lambda: pair.decode.info()["requests"].get("running") == len(streams), 10, "the streams run")
        ids = prompt(2, LONG)
        assert pair.router.generate(**body(ids))["output_ids"] == expected[tuple(ids)]
        assert places(pair.decode) == (at_first[0], at_first[1] + 1)
        for stream in streams:
            stream.result(limit(60))
        # The prefill has prompts to compute and does not get on: what comes now is sooner done by the idle decode.
        worker = pair.prefill.family()["worker"]
        freeze(worker.pid)
        try:
            behind = [pool.submit(pair.prefill.generate, **body(prompt(3 + i, LONG), 1)) for i in range(4)]
            wait_until(lambda: pair.prefill.info()["requests"]["total"] == len(behind), 10, "the prompts wait")
            ids = prompt(3, SHORT)
            assert pair.router.generate(**body(ids))["output_ids"] == expected[tuple(ids)]
            assert places(pair.decode) == (at_first[0] + 1, at_first[1] + 1)
        finally:
            worker.resume()
        for answer in behind:
            answer.result(limit(60))
        wait_until(lambda: all(of_metrics(pair.decode, name) for name in FAMILIES), 10, "the books are on the page")
        pair.assert_all_returned()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tcp", "shm"])
def test_under_load_the_answers_are_the_same_wherever_they_are_computed(tmp_path, tiny_args, expected, backend):
    auto = ("--disaggregation-threshold", "auto")
    with (
        pd_pair(tmp_path, backend, *tiny_args, *auto, decode_args=SLOW_BESIDE_STREAMS) as pair,
        ThreadPoolExecutor(12) as pool,
    ):
        prompts = [list(ids) for ids in expected] * 4
        answers = list(pool.map(lambda ids: pair.router.generate(**body(ids)), prompts))
        wrong = [len(ids) for ids, a in zip(prompts, answers, strict=True) if a["output_ids"] != expected[tuple(ids)]]
        assert not wrong
        # The router may have sent some to the prefill alone, which decodes faster than an instance with many streams.
        routed = Page(pair.router.client.get(pair.router.url + "/metrics").text)
        sent = {r: routed.total("pdserve_router_instance_requests_total", leg=r) for r in ("prefill", "decode")}
        assert sent == {"prefill": len(prompts), "decode": sum(places(pair.decode))}
        assert sent["decode"] > 0
        pair.assert_all_returned()
