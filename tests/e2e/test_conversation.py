"""Conversations through a pair: what was computed or generated in one turn is not computed again in the next."""

from __future__ import annotations

import pytest
from support.processes import pd_pair, wait_until
from support.scrape import Page

TURNS, SAYS, ANSWERS = 10, 45, 70


def body(ids: list[int]) -> dict:
    return {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": ANSWERS, "ignore_eos": True}}


def says(turn: int) -> list[int]:
    return [(turn * 997 + i * 31) % 40000 + 100 for i in range(SAYS)]


def returned(server) -> float:
    return Page(server.client.get(server.url + "/metrics").text).total("pdserve_kv_returned_total")


@pytest.mark.parametrize("backend", ["shm"])
def test_ten_turns_compute_next_to_nothing_again(tmp_path, tiny_args, alone, backend, capsys):
    expected: list[list[int]] = []
    history: list[int] = []
    for turn in range(TURNS):
        history += says(turn)
        expected.append(alone.generate(**body(history))["output_ids"])
        history += expected[-1]
    (tmp_path / "secret").write_text("k" * 64)
    secret = ["--cluster-secret-file", str(tmp_path / "secret")]
    with pd_pair(tmp_path, backend, *tiny_args, *secret, router_args=secret, decode_args=["--return-kv"]) as pair:
        history, prompts = [], 0
        for turn in range(TURNS):
            history += says(turn)
            prompts += len(history)
            assert pair.router.generate(**body(history))["output_ids"] == expected[turn]
            history += expected[turn]
            wait_until(lambda t=turn: returned(pair.prefill) > t, 10, "the KV is back")
        computed = pair.prefill.info()["counters"]["prompt_tokens"] + pair.decode.info()["counters"]["prompt_tokens"]
        again = computed - TURNS * SAYS
        with capsys.disabled():
            print(f"\n{prompts} prompt tokens in {TURNS} turns, {TURNS * SAYS} of them new: {again} computed again")
        assert again <= 0.05 * prompts
        pair.assert_all_returned()
