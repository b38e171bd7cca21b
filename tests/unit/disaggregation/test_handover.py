"""The hand-over between two schedulers: tokens as on one instance, whatever the order of events; no page lost or
written late.
"""

from __future__ import annotations

import contextlib
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.handovers import named
from support.sim import NO_WINDOW, SimWindow, make_generate, reference_output
from support.sim_pair import LIMITS, SimPair, assert_all_returned, make_peer, run_until_idle

from pdserve.disaggregation.handover import sender_table, unclaimed_rooms
from pdserve.disaggregation.handover.kv_sender import SenderState
from pdserve.disaggregation.handover.peer import PeerState, Writing
from pdserve.disaggregation.handover.receiver_table import STUCK_SECONDS, ReceiverState
from pdserve.messages.base import unpack_i32
from pdserve.messages.handover import (
    Abort,
    AbortAck,
    FirstToken,
    RoomQueued,
    TransferDone,
    TransferFailed,
    TransferRequest,
)
from pdserve.messages.outputs import FinishType, Timing, TokenLogprob
from pdserve.messages.requests import AbortReq
from pdserve.messages.worker import ForwardStep, PagesVerified, SendEnded, StepResult, VerifyPages


def test_one_request_goes_through_with_the_tokens_of_one_instance():
    pair = SimPair()
    pair.submit("a", range(30), 7, max_new_tokens=6)
    run_until_idle(pair)
    assert pair.decode.tokens["a"] == reference_output(range(30), 6)
    assert pair.prefill.tokens["a"] == reference_output(range(30), 1)
    timing = pair.decode.ends["a"].meta.timing
    assert timing.transfer_bytes == 8 * 4 * 8  # eight pages of four 8-byte slots
    assert_all_returned(pair)


def test_decode_keeps_its_own_prefix_and_asks_only_for_the_rest():
    pair = SimPair()
    pair.submit("a", range(30), 1, max_new_tokens=4)
    run_until_idle(pair)
    pair.submit("b", [*range(20), 9, 9, 9, 9, 9], 2, max_new_tokens=4)
    run_until_idle(pair)
    end = pair.decode.ends["b"]
    assert pair.decode.tokens["b"] == reference_output([*range(20), 9, 9, 9, 9, 9], 4)
    assert end.meta.timing.transfer_bytes == 8 * 4 * 2
    assert end.meta.cached_tokens == 20
    assert_all_returned(pair)


def test_either_leg_may_come_first():
    rng = random.Random(1)
    for first, second in (("prefill", "decode"), ("decode", "prefill")):
        pair = SimPair()
        pair.submit("a", range(9), 1, legs=(first,), max_new_tokens=3)
        for _ in range(50):
            rng.choice(pair.moves())()
        pair.submit("a", range(9), 1, legs=(second,), max_new_tokens=3)
        run_until_idle(pair)
        assert pair.decode.tokens["a"] == reference_output(range(9), 3)


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


def test_one_token_or_a_stop_token_ends_right_after_landing():
    pair = SimPair()
    prompt = [5, 6, 7]
    first = reference_output(prompt, 1)[0]
    pair.submit("a", prompt, 1, max_new_tokens=1)
    pair.submit("b", prompt, 2, max_new_tokens=9, stop_ids=[first])
    run_until_idle(pair)
    assert pair.decode.ends["a"].finish.type is FinishType.LENGTH
    assert pair.decode.ends["b"].finish.matched == first
    assert_all_returned(pair)


def test_corrupt_pages_are_never_decoded(caplog):
    """The first token was right, and the others come from what is computed here."""
    pair = SimPair()
    pair.corrupt = True
    pair.submit("a", range(30), 1, max_new_tokens=4)
    with caplog.at_level("INFO"):
        run_until_idle(pair)
    assert pair.decode.tokens["a"] == reference_output(range(30), 4)
    assert pair.decode.receivers.recomputed == 1
    assert "checksum" in caplog.text
    pair.decode.scheduler.memory.flush()
    pair.corrupt = False
    pair.submit("b", range(30), 2, max_new_tokens=4)
    run_until_idle(pair)
    assert pair.decode.tokens["b"] == reference_output(range(30), 4)
    assert pair.decode.ends["b"].meta.timing.transfer_bytes == 8 * 4 * 8  # nothing of the bad pages was cached
    assert_all_returned(pair)


def test_a_leg_that_comes_after_its_room_has_failed_is_told_at_once():
    pair = SimPair()
    pair.submit("a", range(9), 1, legs=("decode",))
    while not any(isinstance(m, TransferRequest) for m in pair.to_prefill):
        pair.decode.plan()
        pair.advance()
        for work in (pair.decode.work, *([pair.decode.transfer] if pair.decode.to_transfer.messages else [])):
            work()
    pair.to_prefill.append(next(m for m in pair.to_prefill if isinstance(m, TransferRequest)))
    while pair.to_prefill:
        pair.deliver_to_prefill()
    assert not pair.prefill.rooms.rooms
    pair.submit("a", range(9), 1, legs=("prefill",))
    run_until_idle(pair)
    for side in (pair.prefill, pair.decode):
        assert "asked for twice" in side.ends["a"].message
    assert_all_returned(pair)


def test_other_prompt_under_the_same_room_is_refused_on_both_sides():
    pair = SimPair()
    pair.submit("a", range(9), 1, legs=("prefill",))
    pair.submit("a", range(1, 10), 1, legs=("decode",))
    run_until_idle(pair)
    for side in (pair.prefill, pair.decode):
        assert side.ends["a"].status == 409
        assert "another prompt" in side.ends["a"].message
    assert_all_returned(pair)


def test_room_in_use_is_refused():
    pair = SimPair()
    pair.submit("a", range(9), 1)
    pair.submit("b", range(9), 1)
    run_until_idle(pair)
    assert pair.decode.tokens["a"] == reference_output(range(9), 8)
    for side in (pair.prefill, pair.decode):
        assert side.ends["b"].status == 400


@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_missing_other_leg_ends_in_an_error_within_the_time_limit(leg):
    rng = random.Random(1)
    pair = SimPair()
    pair.submit("a", range(9), 1, legs=(leg,))
    for _ in range(40):
        rng.choice(pair.moves())()
    pair.now += LIMITS.bootstrap + 0.1
    run_until_idle(pair)
    assert getattr(pair, leg).ends["a"].status == 504
    assert_all_returned(pair)


def test_aborted_destination_is_not_reused_before_the_prefill_has_let_go():
    rng = random.Random(1)
    pair = SimPair()
    pair.submit("a", range(30), 1, max_new_tokens=4)
    while not pair.pushes:
        rng.choice(pair.moves())()
    pair.decode.scheduler.abort(AbortReq("a"))
    pair.collect()
    assert pair.decode.ends["a"].finish.type is FinishType.ABORT
    assert pair.decode.scheduler.memory.usage()["in_use"] > 0
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
    in_use = pair.decode.scheduler.memory.usage()["in_use"]
    assert in_use >= len(unpack_i32(check.pages[0])) * pair.decode.options.page_size
    pair.check()
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
    assert pair.decode.scheduler.memory.usage()["in_use"] > 0
    pair.link_is_down()
    run_until_idle(pair)
    assert_all_returned(pair)
    pair.submit("b", range(30), 2, max_new_tokens=4)
    run_until_idle(pair)
    assert pair.decode.tokens["b"] == reference_output(range(30), 4)


def test_memory_that_a_peer_does_not_let_go_of_is_somebodys_to_look_after():
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


def test_a_bad_prefix_is_not_cached_after_its_room_has_drained():
    pair, rng = SimPair(chunked_prefill_size=8), random.Random(3)
    pair.submit("a", range(30), 1, max_new_tokens=4)
    while not pair.pushes:
        rng.choice(pair.moves())()
    run, worker = pair.prefill.worker.run, pair.prefill.worker

    def bad(step: ForwardStep) -> StepResult:
        worker.run = run
        result = run(step)
        result.bad_entries = [0]
        return result

    worker.run = bad
    while "a" not in pair.prefill.ends:
        pair.prefill.plan()
        pair.prefill.work()
    assert pair.prefill.ends["a"].status == 500
    assert pair.pushes, "the room still pushes when its request has failed"
    run_until_idle(pair)
    assert pair.prefill.scheduler.memory.usage()["cached"] == 0
    pair.submit("b", range(30), 2, max_new_tokens=4)
    run_until_idle(pair)
    assert pair.prefill.scheduler.planner.cached_tokens == 0
    assert pair.decode.tokens["b"] == reference_output(range(30), 4)
    assert_all_returned(pair)


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
    assert decode.scheduler.memory.usage()["in_use"] == 32  # what the prefill may still write
    pair.link_is_down()
    run_until_idle(pair)
    assert_all_returned(pair)


def test_a_request_that_waits_for_memory_too_long_is_told():
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


def test_history_for_penalties_begins_with_the_token_that_came_from_the_prefill():
    pair = SimPair()
    pair.submit("a", range(10), 1, max_new_tokens=3, repetition_penalty=1.5)
    rng = random.Random(5)
    steps = []
    while not steps:
        rng.choice(pair.moves())()
        steps = [m for m in pair.decode.to_worker.messages if isinstance(m, ForwardStep)]
    [row] = steps[0].new_rows
    assert unpack_i32(row.history).tolist() == [*range(10), *reference_output(range(10), 1)]
    assert row.prompt_len == 10


def test_other_decode_can_not_take_a_room_over():
    pair = SimPair()
    pair.submit("a", range(30), 1, max_new_tokens=2)
    while not pair.pushes:
        random.Random(6).choice(pair.moves())() if not pair.to_prefill else pair.deliver_to_prefill()
        pair.prefill.plan()
        pair.prefill.work()
        pair.advance()
    stranger = make_peer("stranger", writing=Writing.READY)
    senders = pair.prefill.senders
    senders.on_queued(stranger, RoomQueued("prefill", named(1, epoch="stranger")), pair.now)
    senders.on_abort(stranger, Abort("prefill", named(1, epoch="stranger"), "mine now"), pair.now)
    assert senders.rooms[1].peer is pair.peer
    run_until_idle(pair)
    assert pair.decode.tokens["a"] == reference_output(range(30), 2)


def test_decode_that_comes_late_is_told_at_once_that_the_prefill_gave_up():
    pair = SimPair()
    pair.submit("a", range(9), 1, legs=("prefill",))
    pair.prefill.scheduler.abort(AbortReq("a"))
    pair.submit("a", range(9), 1, legs=("decode",))
    run_until_idle(pair)
    assert pair.decode.ends["a"].status == 503
    assert "gave up" in pair.decode.ends["a"].message
    assert_all_returned(pair)


def until_delivered(pair: SimPair) -> None:
    """What was sent has arrived."""
    pair.advance()
    while pair.to_prefill or pair.to_decode:
        if pair.to_prefill:
            pair.deliver_to_prefill()
        if pair.to_decode:
            pair.deliver_to_decode()
        pair.advance()


@pytest.mark.parametrize("why", ["left", "another's", "too many"])
def test_what_was_refused_once_is_over_whatever_comes_behind(why, monkeypatch):
    """The decode has been told that nothing is written for it, and its pages may be somebody else's."""
    pair = SimPair()
    senders, name = pair.prefill.senders, named(1, 1, "decode")
    if why == "left":
        pair.submit("a", range(9), 1, legs=("prefill",))
        pair.prefill.scheduler.abort(AbortReq("a"))
    elif why == "another's":
        stranger = make_peer("stranger", writing=Writing.READY)
        senders.on_queued(stranger, RoomQueued("prefill", named(1, epoch="stranger")), pair.now)
    else:
        monkeypatch.setattr(unclaimed_rooms, "PEER_ROOMS", 0)
    senders.on_queued(pair.peer, RoomQueued("prefill", name), pair.now)
    monkeypatch.undo()
    if why == "another's":
        stranger.state = PeerState.GONE
        senders.on_gone(stranger)
    pages = bytes(4 * 3)
    senders.on_request(pair.peer, TransferRequest("prefill", name, 9, 1, 0, [pages]), pair.now)
    senders.on_queued(pair.peer, RoomQueued("prefill", name), pair.now)
    assert [type(m) for m in pair.peer.unsent] == [TransferFailed]
    assert senders.rooms == {}
    pair.peer.unsent.clear()
    pair.submit("b", range(9), 1, legs=("prefill",))
    senders.on_abort(pair.peer, Abort("prefill", name, "late"), pair.now)
    assert senders.rooms[1].state is SenderState.AHEAD  # it has nothing else to compute
    assert senders.rooms[1].request is None


def test_both_legs_are_told_where_a_name_is_used_again_too_soon():
    pair = SimPair()
    pair.submit("a", range(9), 1, legs=("decode",))
    until_delivered(pair)
    pair.decode.scheduler.abort(AbortReq("a"))
    pair.collect()
    until_delivered(pair)
    pair.submit("b", range(9), 1, legs=("prefill",))
    pair.submit("b", range(9), 1, legs=("decode",))
    until_delivered(pair)
    assert [side.ends["b"].status for side in (pair.prefill, pair.decode)] == [503, 503]
    pair.submit("c", range(9), 1, max_new_tokens=3)
    run_until_idle(pair)
    assert pair.decode.tokens["c"] == reference_output(range(9), 3)
    assert_all_returned(pair)


@pytest.mark.parametrize("late", ["prefill", "decode"])
def test_a_room_can_be_used_again_whichever_leg_was_left_alone_before(late: str) -> None:
    """What was noted for the leg that never came is not said to the next one."""
    pair = SimPair()
    early = {"prefill": "decode", "decode": "prefill"}[late]
    pair.submit("a", range(9), 1, legs=(early,))
    until_delivered(pair)
    getattr(pair, early).scheduler.abort(AbortReq("a"))
    pair.collect()
    until_delivered(pair)
    pair.submit("b", range(9), 1, legs=(early,), max_new_tokens=3)
    until_delivered(pair)
    pair.submit("b", range(9), 1, legs=(late,), max_new_tokens=3)
    run_until_idle(pair)
    assert pair.decode.tokens["b"] == reference_output(range(9), 3)
    for rid, first in (("c", "decode"), ("d", "prefill")):
        # An abort that crossed the end of "b" says nothing of what comes after it.
        pair.prefill.senders.on_abort(
            pair.peer, Abort("prefill", named(1, 2 if late == "prefill" else 1, "decode"), ""), 1.0
        )
        pair.peer.unsent.clear()
        pair.submit(rid, range(9), 1, legs=(first,), max_new_tokens=3)
        until_delivered(pair)
        pair.submit(rid, range(9), 1, legs=("prefill" if first == "decode" else "decode",), max_new_tokens=3)
        run_until_idle(pair)
        assert pair.decode.tokens[rid] == reference_output(range(9), 3)
    assert_all_returned(pair)


def test_an_end_that_crosses_its_cancel_is_not_the_answer_to_it():
    """A decode that uses a name again must not have its pages let go of by the answer to the first cancel."""
    pair, rng = SimPair(), random.Random(1)
    pair.submit("a", range(30), 1, max_new_tokens=4)
    while not pair.pushes:
        rng.choice(pair.moves())()
    senders, name = pair.prefill.senders, named(1, 1, "decode")
    pair.decode.scheduler.abort(AbortReq("a"))
    pair.collect()
    until_delivered(pair)
    assert senders.rooms[1].failure is not None
    senders.on_send_ended(SendEnded(name, nbytes=100))
    assert senders.rooms[1].hold is not None
    pair.check()
    run_until_idle(pair)
    assert senders.rooms == {}
    assert_all_returned(pair)


def test_time_in_the_prefills_queue_is_not_time_of_the_transfer():
    pair = SimPair(max_total_tokens=64, disable_radix_cache=True)
    pair.prefill.submit("old", range(40), max_new_tokens=400)
    pair.prefill.plan()
    pair.submit("a", range(40), 1, max_new_tokens=4)
    for _ in range(3):
        until_delivered(pair)
    pair.now += LIMITS.queue - 1
    pair.advance()
    pair.prefill.scheduler.abort(AbortReq("old"))
    for _ in range(6):
        pair.prefill.plan()
        pair.prefill.work()
    assert pair.pushes
    pair.now += LIMITS.transfer - 1  # in all more than the queue may take
    pair.advance()
    assert pair.prefill.senders.rooms[1].failure is None
    pair.now += 1.1
    pair.advance()
    assert "no progress" in pair.prefill.senders.rooms[1].failure[1]
    run_until_idle(pair)
    assert_all_returned(pair)


def test_what_is_said_of_an_earlier_attempt_does_nothing_to_the_next():
    pair = SimPair()
    pair.submit("a", range(9), 1, legs=("decode",))
    until_delivered(pair)
    pair.decode.scheduler.abort(AbortReq("a"))
    until_delivered(pair)
    for leg in ("decode", "prefill"):
        pair.submit("b", range(9), 1, legs=(leg,), max_new_tokens=3)
        until_delivered(pair)
    first, second = named(1, 1, "decode"), pair.decode.rooms.rooms[1].handover
    assert second == named(1, 2, "decode")
    receivers, senders = pair.decode.receivers, pair.prefill.senders
    receivers.on_first_token(pair.link, FirstToken("decode", first, 5, 0, Timing()), pair.now)
    receivers.on_done(pair.link, TransferDone("decode", first, [], Timing()), pair.now)
    receivers.on_failed(pair.link, TransferFailed("decode", first, 503, "old"), pair.now)
    receivers.on_abort_ack(pair.link, AbortAck("decode", first), pair.now)
    pair.decode.rooms.rooms[1].checking = True
    receivers.on_verified(PagesVerified(first, ok=False), pair.now)
    pair.decode.rooms.rooms[1].checking = False
    senders.on_abort(pair.peer, Abort("prefill", first, "old"), pair.now)
    senders.on_send_ended(SendEnded(first, error="old"))
    assert pair.peer.unsent.pop() == AbortAck("decode", first)
    run_until_idle(pair)
    assert pair.decode.tokens["b"] == reference_output(range(9), 3)
    assert_all_returned(pair)


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


def test_an_abort_that_the_prefill_hears_first_is_an_abort_here_too():
    pair, rng = SimPair(), random.Random(3)
    pair.submit("a", range(30), 1, max_new_tokens=4)
    while pair.prefill.senders.rooms[1].request is None:
        rng.choice(pair.moves())()
    pair.prefill.scheduler.abort(AbortReq("a", "by the test"))
    run_until_idle(pair)
    assert pair.decode.ends["a"].finish.type is FinishType.ABORT
    assert_all_returned(pair)


def test_kv_of_a_source_that_nobody_vouches_for_is_for_its_own_requests_only():
    pair = SimPair()
    pair.submit("a", range(33), 1, max_new_tokens=4)
    run_until_idle(pair)
    memory = pair.decode.scheduler.memory
    for rid, vouched, host, expected in (("b", False, "elsewhere", 0), ("c", True, "p", 0), ("d", False, "p", 32)):
        msg = make_generate(rid, range(33), max_new_tokens=4, room=9)
        where = msgspec.structs.replace(msg.bootstrap, host=host, vouched=vouched)
        pair.decode.scheduler.admit_message(msgspec.structs.replace(msg, bootstrap=where), pair.now)
        assert memory.prefix_len(pair.decode.scheduler.reqs[rid]) == expected, rid
        pair.decode.scheduler.abort(AbortReq(rid))


def test_open_handovers_are_told_with_where_they_stand():
    pair, rng = SimPair(), random.Random(1)
    seen = {"sending": [], "receiving": []}

    def look():
        for room in pair.prefill.senders.info(pair.now) + pair.decode.receivers.info(pair.now):
            states = seen[room["direction"]]
            if not states or states[-1] != room["state"]:
                states.append(room["state"])
            assert (room["room"], room["seconds"] >= 0) == (7, True)
        return seen

    pair.prefill.submit("busy", range(50, 60), max_new_tokens=100)
    pair.submit("a", range(30), 7, legs=("prefill",), max_new_tokens=2)
    look()
    pair.submit("a", range(30), 7, legs=("decode",), max_new_tokens=2)
    while not pair.pushes:
        look()
        rng.choice(pair.moves())()
    look()
    (room,) = pair.decode.receivers.info(pair.now)
    assert (room["rid"], room["peer"], room["prompt_tokens"], room["reason"]) == ("a", "prefill", 30, None)
    pair.prefill.scheduler.abort(AbortReq("a"))
    look()
    run_until_idle(pair)
    look()
    assert seen["sending"] == ["bootstrapping", "queued", "pushing", "draining"]
    assert seen["receiving"][:2] == ["linking", "transferring"]  # it found memory in the same turn
    assert pair.prefill.senders.info(pair.now) == pair.decode.receivers.info(pair.now) == []


def test_window_pages_are_offered_when_nobody_reads_them_any_more():
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


@settings(max_examples=16, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    pool=st.sampled_from([64, 128, 256]),
    chunk=st.sampled_from([4, 16, -1]),
    radix=st.booleans(),
    faults=st.booleans(),
    interval=st.sampled_from([1, 3, 32]),
    window=st.sampled_from([NO_WINDOW, SimWindow(6, 32), SimWindow(13, 64)]),
)
def test_random_handovers(seed, pool, chunk, radix, faults, interval, window):
    rng = random.Random(seed)
    # A prompt that is not cut needs all of its window pages at once.
    pair = SimPair(
        NO_WINDOW if chunk == -1 else window,
        max_total_tokens=pool,
        chunked_prefill_size=chunk,
        disable_radix_cache=not radix,
        schedule_conservativeness=0.05,
        stream_interval=interval,
    )
    expected, cut = {}, set()
    for i in range(12):
        rid = f"r{i}"
        base = rng.choice([[1, 2, 3, 4, 5, 6, 7, 8, 9], [9, 9], []])
        prompt = base + [rng.randrange(5) for _ in range(rng.randrange(1, 20))]
        budget = rng.randrange(1, 12)
        pair.submit(rid, prompt, 100 + i, max_new_tokens=budget, stream=rng.random() < 0.7)
        expected[rid] = reference_output(prompt, budget)
        for _ in range(rng.randrange(12)):
            rng.choice(pair.moves())()
        pair.check()
        if rng.random() < 0.25:
            victim = rng.choice(list(expected))
            cut.add(victim)
            getattr(pair, rng.choice(["prefill", "decode"])).scheduler.abort(AbortReq(victim))
            pair.collect()
        if faults and rng.random() < 0.08:
            cut.update(expected)
            pair.lose_link()
            for _ in range(rng.randrange(6)):  # pages still on their way land in pages that nobody may have yet
                copies = [m for m in pair.moves() if "lambda" in str(m)]
                if copies:
                    rng.choice(copies)()
                pair.decode.plan()
                pair.decode.work()
            pair.link_is_down()
    run_until_idle(pair, rng)
    for rid, tokens in expected.items():
        got = pair.decode.tokens.get(rid, [])
        assert got == tokens[: len(got)]
        if rid not in cut:
            assert got == tokens
    assert pair.decode.ends.keys() == pair.prefill.ends.keys() == expected.keys()
    assert_all_returned(pair)


def test_pages_may_fail_to_leave_before_the_step_that_computes_them_is_done():
    """They leave by layers: the link can break while the others are computed."""
    pair, rng = SimPair(disable_radix_cache=True), random.Random(3)  # it waits to be asked
    pair.submit("a", range(13), 1, max_new_tokens=4)
    while not any(step.pushes for step in pair.prefill.to_worker.messages if isinstance(step, ForwardStep)):
        rng.choice([move for move in pair.moves() if move != pair.prefill.work])()
    step = next(m for m in pair.prefill.to_worker.messages if isinstance(m, ForwardStep))
    pair.prefill.senders.on_send_ended(SendEnded(step.pushes[0].handover, error="the link is down"))
    step.pushes.clear()
    pair.check()
    run_until_idle(pair)
    assert pair.prefill.ends["a"].status == pair.decode.ends["a"].status == 502
    assert_all_returned(pair)


def run_until(pair: SimPair, done) -> None:
    rng = random.Random(0)
    for _ in range(20_000):
        if done():
            return
        rng.choice(pair.moves())()
    raise AssertionError("not done")


def plan_and_work(side) -> None:
    """One step of an instance, planned and done."""
    side.plan()
    side.outbox.flush()
    side.work()


@pytest.mark.parametrize("steps_before", [0, 1, 2, 3])
def test_an_idle_prefill_begins_before_it_is_asked(steps_before):
    """And computes nothing twice, however far it is when the decode asks."""
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


def test_memory_that_nobody_has_asked_for_is_given_to_who_waits_for_it():
    pair = SimPair(max_total_tokens=64)
    pair.submit("a", range(30), 1, legs=("prefill",))
    while pair.prefill.senders.rooms[1].first is None:
        plan_and_work(pair.prefill)
    assert pair.prefill.scheduler.memory.usage()["in_use"] > 0
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


def test_several_answers_are_one_hand_over():
    pair = SimPair()
    for i in range(4):
        pair.submit(f"a-{i}", range(30), 7 + i, max_new_tokens=6, fork_of="a-0" if i else "")
    run_until_idle(pair, random.Random(3))
    expected = reference_output(range(30), 6)
    assert all(pair.decode.tokens[f"a-{i}"] == expected for i in range(4))
    assert pair.decode.receivers.done == pair.prefill.senders.done == 1
    assert pair.prefill.scheduler.counters.prompt_tokens == 30
    assert pair.decode.scheduler.counters.prompt_tokens == 3 * 2  # behind the last whole page
    assert_all_returned(pair)


def test_where_the_one_hand_over_fails_the_other_answers_are_computed_here():
    pair = SimPair()
    pair.corrupt = True
    for i in range(3):
        pair.submit(f"a-{i}", range(30), 7 + i, max_new_tokens=6, fork_of="a-0" if i else "")
    run_until_idle(pair, random.Random(4))
    assert all(pair.decode.tokens[f"a-{i}"] == reference_output(range(30), 6) for i in range(3))
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
        if pair.decode.scheduler.planner.retractions:
            break
    assert pair.decode.scheduler.planner.retractions
    pair.submit("early", range(36), 1, max_new_tokens=4, place=0)
    run_until_idle(pair, random.Random(3))
    for i in range(2):
        assert pair.decode.tokens[f"local-{i}"] == reference_output(range(50 + i * 30, 70 + i * 30), 30)
    assert pair.decode.tokens["early"] == reference_output(range(36), 4)
    assert_all_returned(pair)


def ask_if_it_may(pair: SimPair) -> bool:
    """Whether the decode asks for the KV of what waits, while its worker computes and answers nothing."""
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
    """A prompt that the decode computes itself keeps nobody waiting: its steps touch what it has, and nothing else."""
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
    under_way = pair.decode.scheduler.memory.newest_step
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
    free = decode.scheduler.memory.obtainable
    decode.plan()
    under_way = decode.scheduler.memory.newest_step
    assert under_way > decode.scheduler.completed_step
    assert decode.scheduler.memory.obtainable == free - 16 - 4  # the prompt that is cached, and a page for the output
    pair.submit("a", range(9), 1, max_new_tokens=3)
    assert not ask_if_it_may(pair)
    while decode.work():
        pass
    assert decode.scheduler.completed_step >= under_way
    assert ask_if_it_may(pair)
    run_until_idle(pair)
    assert decode.tokens["a"] == reference_output(range(9), 3)
    assert decode.tokens["scored"] == reference_output(range(50, 66), 9)
