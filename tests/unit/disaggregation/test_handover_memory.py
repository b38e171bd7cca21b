"""Requests that wait for memory beside hand-overs: which ones get it, and how long they wait."""

from __future__ import annotations

import contextlib
import random

import pytest
from support.sim import reference_output
from support.sim_pair import LIMITS, SimPair, assert_all_returned, run_until_idle

from pdserve.disaggregation.handover.kv_receiver import ReceiverState
from pdserve.disaggregation.handover.receiver_rooms import STUCK_SECONDS
from pdserve.messages.outputs import FinishType
from pdserve.messages.requests import AbortReq


def test_memory_for_landing_goes_to_who_came_behind_a_batch_before_the_rest_of_it():
    pair = SimPair(max_total_tokens=40)
    for place in range(8):
        pair.submit(f"batch-{place}", range(place, place + 30), place, max_new_tokens=2, place=place)
    pair.submit("chat", range(50, 80), 99, max_new_tokens=2)
    run_until_idle(pair)
    order = list(pair.decode.ends)
    assert order.index("chat") < 2
    assert [rid for rid in order if rid != "chat"] == [f"batch-{place}" for place in range(8)]
    assert_all_returned(pair)


def test_memory_that_a_peer_does_not_let_go_of_is_a_warning():
    rng = random.Random(1)
    pair = SimPair()
    pair.submit("a", range(30), 1, max_new_tokens=4)
    while not pair.pushes:
        rng.choice(pair.moves())()
    pair.lose_link()
    receivers = pair.decode.receivers
    assert receivers.warning(pair.now + STUCK_SECONDS - 1) is None
    warning = receivers.warning(pair.now + STUCK_SECONDS + 1)
    assert "1 hand-overs (30 tokens)" in warning
    assert "instance prefill" in warning
    pair.link_is_down()
    assert receivers.warning(pair.now + STUCK_SECONDS + 1) is None
    run_until_idle(pair)


def test_a_lone_request_does_not_wait_for_ever_for_memory_that_a_silent_prefill_holds():
    rng = random.Random(1)
    pair = SimPair(max_total_tokens=64, disable_radix_cache=True, disaggregation_queue_timeout=5.0)
    pair.submit("a", range(30), 1, max_new_tokens=4)
    while not pair.pushes:
        rng.choice(pair.moves())()
    pair.lose_link()
    decode = pair.decode
    decode.submit("b", range(20), max_new_tokens=30)
    for _ in range(100):
        decode.plan()
        decode.work()
    assert "b" not in decode.ends
    assert len(decode.tokens["b"]) < 30
    decode.now += 5.1
    decode.plan()
    assert decode.ends["b"].status == 503
    decode.submit("c", range(40), max_new_tokens=1)  # it can't even begin
    decode.plan()
    decode.now += 5.1
    decode.plan()
    assert decode.ends["c"].status == 503
    assert decode.scheduler.memory.pool.usage()["in_use"] == 32  # what the prefill may still write
    pair.link_is_down()
    run_until_idle(pair)
    assert_all_returned(pair)


def test_a_request_that_waits_for_memory_too_long_ends_with_an_error():
    rng = random.Random(1)
    pair = SimPair(max_total_tokens=64, disable_radix_cache=True)
    pair.decode.submit("old", range(40), max_new_tokens=400)
    pair.decode.plan()
    pair.submit("a", range(40), 1, max_new_tokens=4)
    for _ in range(40):
        rng.choice([m for m in pair.moves() if m not in (pair.decode.plan, pair.decode.work)])()
    assert pair.decode.rooms.rooms[1].state is ReceiverState.QUEUED
    pair.now += LIMITS.queue + 0.1
    pair.decode.scheduler.abort(AbortReq("old"))
    pair.advance()
    assert "memory for the prompt" in pair.decode.ends["a"].message
    run_until_idle(pair)
    assert pair.prefill.ends["a"].finish.type is FinishType.ABORT
    assert_all_returned(pair)


@pytest.mark.parametrize("first", ["local", "incoming"])
def test_local_and_incoming_requests_share_memory_as_they_came(first):
    pair = SimPair(max_total_tokens=48)
    for i in range(12):
        is_local = (i % 2 == 0) == (first == "local")
        prompt = [i * 3 + j for j in range(30)]
        if is_local:
            pair.decode.submit(f"local-{i}", prompt, max_new_tokens=4, place=i)
        else:
            pair.submit(f"incoming-{i}", prompt, i, max_new_tokens=4, place=i)
    while not pair.is_idle:
        # As the loop has it: hand-overs first, which so had all memory that became free.
        pair.advance()
        for move in [m for m in pair.moves() if m not in (pair.decode.plan, pair.prefill.plan, pair.advance)]:
            with contextlib.suppress(KeyError, IndexError):
                move()
        pair.prefill.plan()
        pair.decode.plan()
    order = [rid.partition("-")[0] for rid in pair.decode.ends]
    assert all({"local", "incoming"} == set(order[at : at + 4]) for at in range(0, 12, 4)), order
    assert_all_returned(pair)


def test_one_that_was_retracted_and_one_that_came_before_it_dont_wait_for_each_other():
    """The one takes no newcomer before it; the other, with its KV elsewhere, came first."""
    pair = SimPair(max_total_tokens=64, schedule_conservativeness=0.01)
    for i in range(2):
        pair.decode.submit(f"local-{i}", range(50 + i * 30, 70 + i * 30), max_new_tokens=30, place=1 + i)
    for _ in range(200):
        pair.decode.plan()
        pair.decode.work()
        if pair.decode.scheduler.planner.retraction.count:
            break
    assert pair.decode.scheduler.planner.retraction.count
    pair.submit("early", range(36), 1, max_new_tokens=4, place=0)
    run_until_idle(pair, random.Random(3))
    for i in range(2):
        assert pair.decode.tokens[f"local-{i}"] == reference_output(range(50 + i * 30, 70 + i * 30), 30)
    assert pair.decode.tokens["early"] == reference_output(range(36), 4)
    assert_all_returned(pair)
