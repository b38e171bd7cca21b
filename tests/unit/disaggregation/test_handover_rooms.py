"""Rooms of hand-overs: a missing, late or refused leg, a name that is used again, late messages of an old attempt."""

from __future__ import annotations

import random

import pytest
from support.handovers import named
from support.sim import reference_output
from support.sim_pair import LIMITS, SimPair, assert_all_returned, make_peer, run_until_idle, until_delivered

from pdserve.disaggregation.handover import unclaimed_rooms
from pdserve.disaggregation.handover.kv_receiver import LandedCheck
from pdserve.disaggregation.handover.kv_sender import SenderState, digest_of
from pdserve.disaggregation.handover.peer import PeerState, Writing
from pdserve.messages.handover import (
    Abort,
    AbortAck,
    FirstToken,
    RoomQueued,
    TransferDone,
    TransferFailed,
    TransferRequest,
    Withdraw,
)
from pdserve.messages.outputs import FinishType, Timing
from pdserve.messages.requests import AbortReq
from pdserve.messages.worker import PagesVerified, SendEnded


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


@pytest.mark.parametrize("early", ["prefill", "decode"])
def test_an_abort_of_one_leg_is_an_abort_of_the_leg_that_comes_later(early: str) -> None:
    """A router would count an error against the instances, and send the aborted request again."""
    pair = SimPair()
    pair.submit("a", range(9), 1, legs=(early,))
    until_delivered(pair)
    getattr(pair, early).scheduler.abort(AbortReq("a", "by the test"))
    pair.collect()
    until_delivered(pair)
    late = "decode" if early == "prefill" else "prefill"
    pair.submit("a", range(9), 1, legs=(late,))
    run_until_idle(pair)
    for side in (pair.prefill, pair.decode):
        assert side.ends["a"].finish.type is FinishType.ABORT
        assert "by the test" in side.ends["a"].finish.message
    assert_all_returned(pair)


@pytest.mark.parametrize("status", [400, 408, 503])
def test_a_decode_that_comes_late_fails_as_the_prefill_did(status: int) -> None:
    pair = SimPair()
    pair.submit("a", range(9), 1, legs=("prefill",))
    req = pair.prefill.scheduler.reqs["a"]
    pair.prefill.scheduler.fail(req, status, "it can't be served")
    pair.prefill.scheduler.handovers.cancel(req, "it can't be served")
    pair.submit("a", range(9), 1, legs=("decode",))
    run_until_idle(pair)
    assert pair.decode.ends["a"].status == status
    assert "the prefill instance gave up: it can't be served" in pair.decode.ends["a"].message
    assert_all_returned(pair)


@pytest.mark.parametrize("why", ["left", "another's", "too many"])
def test_what_was_refused_once_is_over_whatever_comes_behind(why, monkeypatch):
    """The decode has been told that nothing is written for it, and its pages may be another request's."""
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
    assert senders.rooms[1].transfer_request is None


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
    for side in (pair.prefill, pair.decode):
        assert side.ends["b"].finish.type is FinishType.ABORT
        assert "gave the hand-over up" in side.ends["b"].finish.message or "gave up" in side.ends["b"].finish.message
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
    senders.pushes.on_send_ended(SendEnded(name, nbytes=100))
    assert senders.rooms[1].transfer.hold is not None
    pair.check()
    run_until_idle(pair)
    assert senders.rooms == {}
    assert_all_returned(pair)


def test_messages_about_an_earlier_attempt_do_nothing_to_the_next():
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
    room = pair.decode.rooms.rooms[1]
    room.check = LandedCheck(room.memory.hold, Timing(), b"")
    receivers.on_verified(PagesVerified(first, ok=False), pair.now)
    room.check = None
    senders.on_abort(pair.peer, Abort("prefill", first, "old"), pair.now)
    senders.pushes.on_send_ended(SendEnded(first, error="old"))
    assert pair.peer.unsent.pop() == AbortAck("decode", first)
    run_until_idle(pair)
    assert pair.decode.tokens["b"] == reference_output(range(9), 3)
    assert_all_returned(pair)


def test_an_abort_that_the_prefill_hears_first_is_an_abort_here_too():
    pair, rng = SimPair(), random.Random(3)
    pair.submit("a", range(30), 1, max_new_tokens=4)
    while pair.prefill.senders.rooms[1].transfer_request is None:
        rng.choice(pair.moves())()
    pair.prefill.scheduler.abort(AbortReq("a", "by the test"))
    run_until_idle(pair)
    assert pair.decode.ends["a"].finish.type is FinishType.ABORT
    assert_all_returned(pair)


@pytest.mark.parametrize("status", [400, 408, 500, 503])
def test_a_request_that_failed_at_the_prefill_fails_with_the_same_status_at_the_decode(status: int) -> None:
    """The router passes on whichever answer comes first."""
    pair = SimPair()
    pair.submit("a", range(9), 4)
    rng = random.Random(1)
    for _ in range(10_000):
        if pair.prefill.senders.rooms[4].decode is not None:
            break
        rng.choice(pair.moves())()
    req = pair.prefill.scheduler.reqs["a"]
    pair.prefill.scheduler.fail(req, status, "it can't be served")
    pair.prefill.scheduler.handovers.cancel(req, "it can't be served")
    run_until_idle(pair)
    assert [side.ends["a"].status for side in (pair.prefill, pair.decode)] == [status, status]
    assert (pair.prefill.senders.failed, pair.decode.receivers.failed) == (1, 1)
    assert_all_returned(pair)


@pytest.mark.parametrize("first", ["decode", "client"])
def test_a_room_that_the_decode_queues_and_never_asks_for_ends(first: str) -> None:
    """Its heartbeat goes on, so it is not gone. It may have lost the room."""
    pair, name = SimPair(), named(1, 1, "decode")
    senders, began = pair.prefill.senders, pair.now + LIMITS.bootstrap - 1
    queued = RoomQueued("prefill", name)
    if first == "decode":
        senders.on_queued(pair.peer, queued, pair.now)
        pair.now = began
        pair.submit("a", range(9), 1, legs=("prefill",))
    else:
        pair.submit("a", range(9), 1, legs=("prefill",))
        senders.on_queued(pair.peer, queued, began)
    # An honest decode waits as long as this for memory and then for a forecast.
    for seconds in (LIMITS.queue, LIMITS.queue + LIMITS.landing):
        senders.tick(began + seconds)
        senders.on_queued(pair.peer, queued, began + seconds)
        assert senders.rooms[1].state in (SenderState.BOOTSTRAPPING, SenderState.AHEAD)
    senders.tick(began + LIMITS.asking)
    assert not senders.rooms
    pair.prefill.plan()
    assert pair.prefill.ends["a"].status == 504
    assert "did not ask for it within 50 s" in pair.prefill.ends["a"].message
    assert [type(message) for message in pair.peer.unsent] == [TransferFailed]


def test_the_limit_starts_anew_when_a_decode_takes_its_request_back() -> None:
    pair, name = SimPair(), named(1, 1, "decode")
    senders, start = pair.prefill.senders, pair.now
    pair.prefill.submit("other", range(9))
    pair.submit("a", range(9), 1, legs=("prefill",))
    req = pair.prefill.scheduler.reqs["a"]
    pages = bytes(4 * 3)
    ask = TransferRequest("prefill", name, 9, digest_of(req, 9), 0, [pages])
    senders.on_request(pair.peer, ask, start)
    assert senders.rooms[1].state is SenderState.QUEUED
    late = start + LIMITS.queue - 1
    senders.on_withdraw(pair.peer, Withdraw("prefill", name), late)
    senders.tick(late + LIMITS.asking - 1)
    assert senders.rooms[1].state is SenderState.BOOTSTRAPPING
    again = late + LIMITS.asking - 1
    senders.on_queued(pair.peer, RoomQueued("prefill", named(1, 2, "decode")), again)
    senders.tick(again + LIMITS.asking - 1)
    assert 1 in senders.rooms
    senders.tick(again + LIMITS.asking)
    assert not senders.rooms


class NoScan(dict):
    """Rooms that are looked up, not searched."""

    def values(self):
        raise AssertionError("all rooms are searched for one")


def test_the_end_of_a_request_searches_no_rooms() -> None:
    """A request of a client without a room is aborted as one with a room is, and thousands may be in one tick."""
    pair = SimPair()
    for room in (1, 2):
        pair.submit(f"r{room}", range(9), room, legs=("decode",))
    pair.decode.submit("local", range(9))
    receivers = pair.decode.receivers
    receivers._rooms.by_number = NoScan(receivers.rooms)
    for rid in ("local", "r1"):
        pair.decode.scheduler.abort(AbortReq(rid))
    assert set(receivers.rooms) == {2}
    receivers._rooms.by_number = dict(receivers.rooms)
    pair.decode.scheduler.abort(AbortReq("r2"))
    run_until_idle(pair)
    assert_all_returned(pair)
