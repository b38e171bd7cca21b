"""A prefill that computes a prompt before its decode has asked for it."""

from __future__ import annotations

import random

import pytest
from support.sim import reference_output
from support.sim_pair import SimPair, assert_all_returned, run_until_idle

from pdserve.disaggregation.handover import sender_table
from pdserve.disaggregation.handover.kv_sender import SenderState
from pdserve.messages.outputs import FinishType
from pdserve.messages.requests import AbortReq


def run_until(pair: SimPair, done) -> None:
    rng = random.Random(0)
    for _ in range(20_000):
        if done():
            return
        rng.choice(pair.moves())()
    raise AssertionError("not done")


def plan_and_work(side) -> None:
    """Plan one step of an instance, and compute it."""
    side.plan()
    side.outbox.flush()
    side.work()


@pytest.mark.parametrize("steps_before", [0, 1, 2, 3])
def test_an_idle_prefill_begins_before_it_is_asked(steps_before):
    """The prefill computes nothing twice, however far it is when the decode asks."""
    pair = SimPair(chunked_prefill_size=8, disable_overlap_schedule=True)
    pair.submit("a", range(22), 1, legs=("prefill",))
    sender = pair.prefill.senders.rooms[1]
    for _ in range(steps_before):
        plan_and_work(pair.prefill)
    assert (sender.state, sender.first is not None) == (SenderState.AHEAD, steps_before == 3)
    assert pair.prefill.scheduler.counters.prompt_tokens == min(22, 8 * steps_before)
    pair.submit("a", range(22), 1, legs=("decode",), max_new_tokens=5)
    run_until_idle(pair, random.Random(2))
    assert pair.decode.tokens["a"] == reference_output(range(22), 5)
    assert pair.prefill.scheduler.counters.prompt_tokens == 22
    assert pair.decode.ends["a"].meta.cached_tokens == 0
    assert_all_returned(pair)


def test_memory_that_is_not_asked_for_is_given_to_requests_that_wait():
    pair = SimPair(max_total_tokens=64)
    pair.submit("a", range(30), 1, legs=("prefill",))
    while pair.prefill.senders.rooms[1].first is None:
        plan_and_work(pair.prefill)
    assert pair.prefill.scheduler.memory.pool.usage()["in_use"] > 0
    pair.prefill.submit("b", range(50, 98), max_new_tokens=3)
    run_until(pair, lambda: "b" in pair.prefill.ends)
    assert pair.prefill.tokens["b"] == reference_output(range(50, 98), 3)
    assert pair.prefill.senders.rooms[1].state is SenderState.BOOTSTRAPPING
    pair.submit("a", range(30), 1, legs=("decode",), max_new_tokens=5)
    run_until_idle(pair, random.Random(2))
    assert pair.decode.tokens["a"] == reference_output(range(30), 5)
    counters = pair.prefill.scheduler.counters
    assert (counters.prompt_tokens, counters.recomputed_tokens > 0) == (30 + 48, True)
    assert pair.decode.ends["a"].meta.cached_tokens == 0
    assert_all_returned(pair)


def test_memory_that_is_not_asked_for_is_kept_while_others_only_wait_for_their_turn():
    pair = SimPair(max_total_tokens=512, chunked_prefill_size=16)
    pair.submit("a", range(30), 1, legs=("prefill",))
    sender = pair.prefill.senders.rooms[1]
    while sender.first is None:
        plan_and_work(pair.prefill)
    for i in range(2):
        pair.prefill.submit(f"b{i}", range(i, 90 + i), max_new_tokens=3)
    waited = 0
    for _ in range(4):
        plan_and_work(pair.prefill)
        pair.now += 0.01
        pair.prefill.senders.tick(pair.now)
        waited += len(pair.prefill.scheduler.planner.waiting)
        assert (sender.state, sender.first is not None) == (SenderState.AHEAD, True)
    assert waited
    pair.submit("a", range(30), 1, legs=("decode",), max_new_tokens=5)
    run_until_idle(pair, random.Random(2))
    assert pair.decode.tokens["a"] == reference_output(range(30), 5)
    assert pair.prefill.scheduler.counters.recomputed_tokens == 0
    assert_all_returned(pair)


@pytest.mark.parametrize("why", ["busy", "prompt logprobs", "no cache", "long"])
def test_who_is_not_idle_or_could_not_keep_it_or_sends_by_layers_waits_to_be_asked(why, monkeypatch):
    if why == "long":
        monkeypatch.setattr(sender_table, "MIN_AHEAD_BYTES", 8 * 22 - 1)
    pair = SimPair(disable_radix_cache=why == "no cache")
    if why == "busy":
        pair.prefill.submit("b", range(50, 60), max_new_tokens=3)
    scores = (0, 0) if why == "prompt logprobs" else None
    pair.submit("a", range(22), 1, logprobs=scores)
    assert pair.prefill.senders.rooms[1].state is SenderState.BOOTSTRAPPING
    run_until_idle(pair, random.Random(2))
    assert_all_returned(pair)


@pytest.mark.parametrize("end", ["aborted", "nobody asks", "another prompt"])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_request_that_began_before_it_was_asked_for_may_end_then(end, steps):
    pair = SimPair(chunked_prefill_size=8)
    pair.submit("a", range(22), 1, legs=("prefill",))
    for _ in range(steps):
        plan_and_work(pair.prefill)
    if end == "aborted":
        pair.prefill.scheduler.abort(AbortReq("a"))
    elif end == "nobody asks":
        pair.now += 6
        pair.advance()
        assert pair.prefill.ends["a"].status == 504
    else:
        pair.submit("a", range(30), 1, legs=("decode",))
    run_until_idle(pair, random.Random(2))
    if end == "aborted":
        assert pair.prefill.ends["a"].finish.type is FinishType.ABORT
    elif end == "another prompt":
        assert pair.prefill.ends["a"].status == pair.decode.ends["a"].status == 409
    assert_all_returned(pair)
