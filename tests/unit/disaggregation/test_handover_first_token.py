"""The first token and its logprobs, which reach the decode before the KV."""

from __future__ import annotations

import random

import pytest
from support.sim import reference_output
from support.sim_pair import SimPair, assert_all_returned, run_until_idle

from pdserve.messages.handover import (
    FirstToken,
)
from pdserve.messages.outputs import TokenLogprob


def test_first_token_that_is_none_fails_the_request_and_nothing_else():
    pair = SimPair()
    pair.submit("a", range(9), 1)
    rng = random.Random(7)
    while not any(isinstance(m, FirstToken) for m in pair.to_decode):
        rng.choice(pair.moves())()
    next(m for m in pair.to_decode if isinstance(m, FirstToken)).token = 2**40
    run_until_idle(pair)
    assert pair.decode.ends["a"].status == 502
    assert_all_returned(pair)


def test_a_first_token_that_no_frame_holds_fails_its_request_once_nothing_is_written():
    pair, rng = SimPair(), random.Random(7)
    pair.submit("a", range(30), 1, max_new_tokens=4)
    while not any(isinstance(m, FirstToken) for m in pair.to_decode):
        rng.choice(pair.moves())()
    (message,) = (m for m in pair.to_decode if isinstance(m, FirstToken))
    pair.to_decode.remove(message)
    pair.prefill.senders.on_too_long(pair.peer, message)
    run_until_idle(pair)
    assert (pair.decode.ends["a"].status, pair.prefill.ends["a"].status) == (400, 400)
    assert_all_returned(pair)


def test_who_has_a_first_token_gets_the_others_whatever_becomes_of_the_prefill():
    for seed in range(30):
        pair, rng = SimPair(), random.Random(seed)
        pair.submit("a", range(30), 1, max_new_tokens=6)
        while not pair.decode.tokens.get("a"):
            rng.choice(pair.moves())()
        pair.lose_link()
        for _ in range(rng.randrange(20)):
            rng.choice(pair.moves())()
        pair.link_is_down()
        run_until_idle(pair)
        assert pair.decode.tokens["a"] == reference_output(range(30), 6)
        assert_all_returned(pair)


def test_a_request_that_its_first_token_ends_is_over_before_its_kv_has_landed():
    pair, rng = SimPair(), random.Random(1)
    pair.submit("a", range(30), 1, max_new_tokens=1)
    while "a" not in pair.decode.ends:
        rng.choice(pair.moves())()
    assert pair.decode.tokens["a"] == reference_output(range(30), 1)
    pair.check()
    run_until_idle(pair)
    assert pair.decode.receivers.done == 1
    pair.submit("b", range(30), 2, max_new_tokens=4)
    run_until_idle(pair)
    assert pair.decode.tokens["b"] == reference_output(range(30), 4)
    assert pair.decode.ends["b"].meta.timing.transfer_bytes < 8 * 4 * 8  # what landed for "a" was kept
    assert_all_returned(pair)


@pytest.mark.parametrize(
    ("asked", "field", "bad"),
    [
        (True, "logprob", TokenLogprob(-1, -0.5)),
        (True, "logprob", TokenLogprob(1 << 20, -0.5)),
        (True, "logprob", TokenLogprob(1, float("nan"))),
        (True, "logprob", TokenLogprob(1, -0.5, [(-1, -0.5)])),
        (True, "logprob", TokenLogprob(1, 99.0)),
        (True, "input_logprobs", [TokenLogprob(1, None), TokenLogprob(-1 << 40, -0.5)]),
        (True, "input_logprobs", [TokenLogprob(1, None)] * 10),
        (False, "logprob", TokenLogprob(-1, -0.5)),
        (False, "input_logprobs", [TokenLogprob(-1, -0.5)] * 10),
    ],
)
def test_logprobs_that_are_none_fail_their_request_and_those_not_asked_for_go_nowhere(asked, field, bad):
    pair, rng = SimPair(), random.Random(7)
    pair.submit("a", range(9), 1, max_new_tokens=3, logprobs=(0, 1) if asked else None)
    while not any(isinstance(m, FirstToken) for m in pair.to_decode):
        rng.choice(pair.moves())()
    message = next(m for m in pair.to_decode if isinstance(m, FirstToken))
    setattr(message, field, bad)
    run_until_idle(pair)
    if asked:
        assert pair.decode.ends["a"].status == 502
    else:
        assert pair.decode.tokens["a"] == reference_output(range(9), 3)
    assert_all_returned(pair)
