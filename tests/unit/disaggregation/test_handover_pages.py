"""Pages of hand-overs: when they are offered to a peer, and when they may be used again."""

from __future__ import annotations

import random

import pytest
from support.sim import SimWindow, reference_output
from support.sim_pair import SimPair, assert_all_returned, run_until_idle

from pdserve.disaggregation.handover.receiver_table import ReceiverState
from pdserve.messages.base import unpack_i32
from pdserve.messages.handover import (
    RoomQueued,
    TransferRequest,
)
from pdserve.messages.outputs import FinishType
from pdserve.messages.requests import AbortReq
from pdserve.messages.worker import ForwardStep, GrantPages, PagesVerified, SendEnded, VerifyPages


def test_aborted_destination_is_not_reused_before_the_prefill_has_let_go():
    rng = random.Random(1)
    pair = SimPair()
    pair.submit("a", range(30), 1, max_new_tokens=4)
    while not pair.pushes:
        rng.choice(pair.moves())()
    pair.decode.scheduler.abort(AbortReq("a"))
    pair.collect()
    assert pair.decode.ends["a"].finish.type is FinishType.ABORT
    assert pair.decode.scheduler.memory.pool.usage()["in_use"] > 0
    receiver = next(iter(pair.decode.rooms.rooms.values()))
    assert receiver.state is ReceiverState.DRAINING
    run_until_idle(pair)
    assert_all_returned(pair)


@pytest.mark.parametrize("how", ["abort", "lost link"])
def test_pages_that_the_worker_still_checks_are_not_reused(how: str) -> None:
    """It may be rewriting them in our own order."""
    pair, rng = SimPair(), random.Random(2)
    pair.submit("a", range(30), 1, max_new_tokens=4)
    while not (pair.decode.rooms.rooms and pair.decode.rooms.rooms[1].state is ReceiverState.VERIFYING):
        rng.choice(pair.moves())()
    [check] = [m for m in pair.decode.to_transfer.messages if isinstance(m, VerifyPages)]
    if how == "abort":
        pair.decode.scheduler.abort(AbortReq("a"))
    else:
        pair.lose_link()
        pair.link_is_down()
    in_use = pair.decode.scheduler.memory.pool.usage()["in_use"]
    assert in_use >= len(unpack_i32(check.pages[0])) * pair.decode.options.page_size
    pair.check()
    run_until_idle(pair)
    assert_all_returned(pair)


@pytest.mark.parametrize("has_first_token", [False, True])
def test_a_hand_over_with_pages_that_can_not_be_granted_ends_at_once(has_first_token: bool) -> None:
    pair, rng = SimPair(), random.Random(3)
    pair.submit("a", range(30), 1, max_new_tokens=4)
    grants, commands = [], pair.decode.to_transfer.messages
    while not grants or (has_first_token and not pair.decode.tokens.get("a")):
        if commands and isinstance(commands[0], GrantPages):
            grants.append(commands.popleft())
        else:
            rng.choice(pair.moves())()
    pair.decode.receivers.on_verified(PagesVerified(grants[0].handover, ok=False, error="no page -1"), pair.now)
    if has_first_token:
        run_until_idle(pair)
        assert pair.decode.receivers.recomputed == 1
        assert pair.decode.tokens["a"] == reference_output(range(30), 4)
    else:
        pair.collect()
        end = pair.decode.ends["a"]
        assert (end.status, end.message) == (500, "this instance can't receive the KV: no page -1")
        run_until_idle(pair)
    assert_all_returned(pair)


def test_fresh_pages_are_offered_only_after_steps_that_may_still_write_them():
    pair = SimPair(max_total_tokens=32, disable_radix_cache=True)
    decode = pair.decode
    decode.submit("old", range(20), max_new_tokens=9)
    decode.plan()
    decode.work()
    decode.plan()
    decode.scheduler.abort(AbortReq("old"))  # its pages are free, its step still runs
    pair.submit("a", range(24), 1, max_new_tokens=2)
    for _ in range(3):
        pair.advance()
    assert not any(isinstance(m, TransferRequest) for m in pair.to_prefill)
    while decode.work():
        pass
    pair.advance()
    assert any(isinstance(m, TransferRequest) for m in pair.to_prefill)
    run_until_idle(pair)
    assert decode.tokens["a"] == reference_output(range(24), 2)


def test_lost_link_fails_requests_at_once_and_frees_pages_when_it_is_down():
    rng = random.Random(1)
    pair = SimPair()
    pair.submit("a", range(30), 1, max_new_tokens=4)
    while not pair.pushes:
        rng.choice(pair.moves())()
    pair.lose_link()
    assert pair.decode.ends["a"].status == 503
    assert pair.decode.scheduler.memory.pool.usage()["in_use"] > 0
    pair.link_is_down()
    run_until_idle(pair)
    assert_all_returned(pair)
    pair.submit("b", range(30), 2, max_new_tokens=4)
    run_until_idle(pair)
    assert pair.decode.tokens["b"] == reference_output(range(30), 4)


def test_window_pages_are_offered_when_no_step_reads_them_any_more():
    pair = SimPair(SimWindow(10, 96))
    pair.decode.submit("long", list(range(60)))
    pair.decode.plan()  # two steps are under way, and the second has left a page that the first sees
    pair.submit("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], 5)
    pair.advance()
    assert [type(message) for message in pair.to_prefill] == [RoomQueued]
    pair.decode.work()
    pair.advance()
    assert isinstance(pair.to_prefill[-1], TransferRequest)
    run_until_idle(pair)
    assert pair.decode.tokens["a"] == reference_output([1, 2, 3, 4, 5, 6, 7, 8, 9], 8)
    assert_all_returned(pair)


def test_pages_may_fail_to_leave_before_the_step_that_computes_them_is_done():
    """They leave by layers: the link can break while the others are computed."""
    pair, rng = SimPair(disable_radix_cache=True), random.Random(3)  # it waits to be asked
    pair.submit("a", range(13), 1, max_new_tokens=4)
    while not any(step.pushes for step in pair.prefill.to_worker.messages if isinstance(step, ForwardStep)):
        rng.choice([move for move in pair.moves() if move != pair.prefill.work])()
    step = next(m for m in pair.prefill.to_worker.messages if isinstance(m, ForwardStep))
    pair.prefill.senders.pushes.on_send_ended(SendEnded(step.pushes[0].handover, error="the link is down"))
    step.pushes.clear()
    pair.check()
    run_until_idle(pair)
    assert pair.prefill.ends["a"].status == pair.decode.ends["a"].status == 502
    assert_all_returned(pair)


def ask_if_it_may(pair: SimPair) -> bool:
    """Tell whether the decode asks for the KV of a waiting request while its worker computes and answers nothing."""
    for _ in range(50):
        for side in (pair.decode, pair.prefill):
            side.plan()
            if side.to_transfer.messages:
                side.transfer()
        pair.advance()
        while pair.to_decode:
            pair.deliver_to_decode()
        if any(isinstance(m, TransferRequest) for m in pair.to_prefill):
            return True
        while pair.to_prefill:
            pair.deliver_to_prefill()
    return False


def test_pages_that_no_step_under_way_touches_are_offered_at_once():
    """A prompt that the decode computes itself keeps no hand-over waiting: its steps touch its own pages alone."""
    pair = SimPair(chunked_prefill_size=8)
    pair.decode.submit("local", range(50, 90), max_new_tokens=3)
    pair.decode.plan()
    assert pair.decode.scheduler.in_flight_since is not None
    pair.submit("a", range(9), 1, max_new_tokens=3)
    assert ask_if_it_may(pair)
    assert pair.decode.scheduler.completed_step == 0
    run_until_idle(pair)
    assert pair.decode.tokens["a"] == reference_output(range(9), 3)
    assert_all_returned(pair)


def test_pages_let_go_of_are_offered_when_steps_are_done_that_may_touch_them():
    pair = SimPair(chunked_prefill_size=8)
    pair.decode.submit("local", range(50, 60), max_new_tokens=200)
    pair.decode.plan()
    pair.decode.scheduler.abort(AbortReq("local"))
    under_way = pair.decode.scheduler.memory.pool.newest_step
    assert under_way > pair.decode.scheduler.completed_step
    pair.submit("a", range(9), 1, max_new_tokens=3)
    assert not ask_if_it_may(pair)
    while pair.decode.work():
        pass
    assert pair.decode.scheduler.completed_step == under_way
    assert ask_if_it_may(pair)
    run_until_idle(pair)
    assert pair.decode.tokens["a"] == reference_output(range(9), 3)


def test_duplicate_pages_are_offered_when_the_step_is_done_that_still_writes_them():
    """A scored prompt computes again what is cached; its own pages go back as soon as its step is planned."""
    pair = SimPair()
    decode = pair.decode
    decode.submit("first", range(50, 66), max_new_tokens=1)
    decode.run_until_idle()
    decode.submit("scored", range(50, 66), max_new_tokens=9, logprobs=(0, 0))
    free = decode.scheduler.memory.pool.obtainable
    decode.plan()
    under_way = decode.scheduler.memory.pool.newest_step
    assert under_way > decode.scheduler.completed_step
    # The prompt that is cached, and a page for the output.
    assert decode.scheduler.memory.pool.obtainable == free - 16 - 4
    pair.submit("a", range(9), 1, max_new_tokens=3)
    assert not ask_if_it_may(pair)
    while decode.work():
        pass
    assert decode.scheduler.completed_step >= under_way
    assert ask_if_it_may(pair)
    run_until_idle(pair)
    assert decode.tokens["a"] == reference_output(range(9), 3)
    assert decode.tokens["scored"] == reference_output(range(50, 66), 9)
