"""Order of requests from their arrival on: requests that come after a batch go before most of it."""

from __future__ import annotations

from support.sim_ring import SimRing

SAMPLING = {"max_new_tokens": 3, "ignore_eos": True, "temperature": 0}


def test_a_prompt_behind_a_batch_is_answered_before_most_of_it() -> None:
    ring = SimRing(max_running_requests=2)
    batch = {"text": [f"prompt {i}" for i in range(40)], "sampling_params": SAMPLING}
    chat = {"text": "hello", "rid": "chat", "sampling_params": SAMPLING}
    answers = ring.post(batch, chat)
    assert [answer.status_code for answer in answers] == [200, 200]
    ended = list(ring.ends)
    place = next(i for i, rid in enumerate(ended) if "chat" in rid)
    assert place < 20, ended


def test_the_choices_of_a_prompt_are_a_batch_too() -> None:
    ring = SimRing(max_running_requests=2)
    choices = {"text": "prompt", "sampling_params": {**SAMPLING, "n": 40}}
    chat = {"text": "hello", "rid": "chat", "sampling_params": SAMPLING}
    ring.post(choices, chat)
    ended = list(ring.ends)
    assert next(i for i, rid in enumerate(ended) if "chat" in rid) < 20, ended
