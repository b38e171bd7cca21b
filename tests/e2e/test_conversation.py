"""Conversations through a pair: what was computed or generated in one turn is not computed again in the next."""

from __future__ import annotations

import pytest
from support.processes import Launched, Pair, pd_pair, wait_until
from support.scrape import Page

TURNS, SAYS, ANSWERS = 10, 45, 70


def body(ids: list[int]) -> dict:
    return {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": ANSWERS, "ignore_eos": True}}


def says(turn: int) -> list[int]:
    return [(turn * 997 + i * 31) % 40000 + 100 for i in range(SAYS)]


def computed(pair: Pair) -> int:
    return sum(server.info()["counters"]["prompt_tokens"] for server in (pair.prefill, pair.decode))


def returned(server: Launched) -> float:
    return Page(server.client.get(server.url + "/metrics").text).total("pdserve_kv_returned_total")


@pytest.fixture(scope="module")
def expected(alone: Launched) -> list[list[int]]:
    found: list[list[int]] = []
    history: list[int] = []
    for turn in range(TURNS):
        history += says(turn)
        found.append(alone.generate(**body(history))["output_ids"])
        history += found[-1]
    return found


def test_ten_turns_compute_next_to_nothing_again(secret_pair, expected, capsys):
    with capsys.disabled():
        print(f"\n{converse(secret_pair, expected)}")


@pytest.mark.slow
def test_ten_turns_by_shared_memory(tmp_path, tiny_args, secrets, expected):
    secret = ["--cluster-secret-file", str(secrets / "ours")]
    with pd_pair(tmp_path, "shm", *tiny_args, *secret, router_args=secret, decode_args=["--return-kv"]) as pair:
        converse(pair, expected)


def test_generate_without_a_limit_ends_at_128_tokens(secret_pair: Pair) -> None:
    """``/generate`` stops at 128 tokens unless told otherwise."""
    answer = secret_pair.router.generate(
        text="The capital of France is", sampling_params={"temperature": 0, "ignore_eos": True}
    )
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 128}


def converse(pair: Pair, expected: list[list[int]]) -> str:
    """Hold a conversation, and return how many tokens of its prompts were computed."""
    returned_before, computed_before = returned(pair.prefill), computed(pair)
    history: list[int] = []
    prompts = 0
    for turn in range(TURNS):
        history += says(turn)
        prompts += len(history)
        assert pair.router.generate(**body(history))["output_ids"] == expected[turn]
        history += expected[turn]
        wait_until(lambda t=turn: returned(pair.prefill) > returned_before + t, 10, "the KV is back")
    again = computed(pair) - computed_before - TURNS * SAYS
    assert again <= 0.05 * prompts
    pair.assert_all_returned()
    return f"{prompts} prompt tokens in {TURNS} turns, {TURNS * SAYS} of them new: {again} computed again"
