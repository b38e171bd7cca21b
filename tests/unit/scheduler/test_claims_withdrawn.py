"""Reservations that are asked back from a prefill, and what a withdrawn request leaves."""

from __future__ import annotations

import random

import pytest
from support.claims import both_ways, hold_back_prefill, make_req, prompt_of, states, submit
from support.handovers import named
from support.sim import reference_output
from support.sim_pair import LIMITS, SimPair, assert_all_returned, run_until_idle

from pdserve.messages.handover import Abort, Forecast, TransferRequest, Withdraw, Withdrawn
from pdserve.messages.outputs import Phase
from pdserve.messages.requests import AbortReq
from pdserve.scheduler.claims import STALL_SECONDS
from pdserve.scheduler.fairness import Tenant
from pdserve.scheduler.req import FirstTokenEstimate, Route


def reserved(pair: SimPair, count: int = 2, **changes) -> SimPair:
    """Fill the decode's pool with ``count`` hand-overs. The prefill has begun none of them."""
    for i in range(1, count + 1):
        submit(pair, f"r{i}", prompt_of(i), room=i, **changes)
    hold_back_prefill(pair)
    assert set(states(pair).values()) == {"TRANSFERRING"}
    return pair


def test_a_stalled_reservation_of_low_priority_is_asked_back_for_one_of_high_priority() -> None:
    pair = reserved(SimPair(max_total_tokens=80, enable_priority_scheduling=True))
    submit(pair, "high", prompt_of(9), room=9, priority=50)
    hold_back_prefill(pair)
    assert states(pair) == {"r1": "TRANSFERRING", "r2": "TRANSFERRING", "high": "QUEUED"}
    pair.now += STALL_SECONDS
    hold_back_prefill(pair)
    assert states(pair) == {"r1": "TRANSFERRING", "r2": "QUEUED", "high": "TRANSFERRING"}
    assert pair.decode.receivers.withdrawn == 1
    pair.decode.scheduler.check_invariants()
    run_until_idle(pair, random.Random(2))
    for number, rid in ((1, "r1"), (2, "r2"), (9, "high")):
        assert pair.decode.tokens[rid] == reference_output(prompt_of(number), 4)
        assert pair.prefill.tokens[rid] == reference_output(prompt_of(number), 1)
    assert_all_returned(pair)


def test_a_reservation_is_not_asked_back_for_its_equal() -> None:
    pair = reserved(SimPair(max_total_tokens=80))
    submit(pair, "later", prompt_of(9), room=9)
    pair.now += 3 * STALL_SECONDS
    hold_back_prefill(pair)
    assert pair.decode.receivers.withdrawn == 0
    run_until_idle(pair)
    assert_all_returned(pair)


def asked_back(begin: bool = False) -> SimPair:
    """Ask ``r2`` back: the question is on its way. With ``begin`` the prefill begins the prompt before it comes."""
    pair = reserved(SimPair(max_total_tokens=80, enable_priority_scheduling=True))
    submit(pair, "high", prompt_of(9), room=9, priority=50)
    pair.now += STALL_SECONDS
    for _ in range(3):
        pair.advance()
    if begin:
        for _ in range(6):
            pair.prefill.plan()
            pair.prefill.work()
            pair.collect()
    assert any(isinstance(message, Withdraw) for message in pair.to_prefill)
    return pair


def test_a_prompt_that_is_begun_is_not_given_back() -> None:
    pair = asked_back(begin=True)
    while pair.to_prefill:
        pair.deliver_to_prefill()
    answers = [message for message in pair.to_decode if isinstance(message, Withdrawn)]
    assert [answer.begun for answer in answers] == [True]
    run_until_idle(pair)
    assert pair.decode.receivers.withdrawn == 0
    assert pair.decode.tokens["r2"] == reference_output(prompt_of(2), 4)
    assert_all_returned(pair)


@pytest.mark.parametrize("when", ["question", "answer"])
@pytest.mark.parametrize("side", ["decode", "prefill"])
def test_a_client_that_leaves_while_memory_is_asked_back_leaves_nothing(side: str, when: str) -> None:
    pair = asked_back()
    if when == "answer":
        while pair.to_prefill:
            pair.deliver_to_prefill()
    getattr(pair, side).scheduler.abort(AbortReq("r2", "gone"))
    pair.collect()
    run_until_idle(pair, random.Random(4))
    assert "r2" not in pair.decode.scheduler.reqs
    assert "r2" not in pair.prefill.scheduler.reqs
    assert not pair.prefill.senders.rooms
    assert pair.decode.tokens["high"] == reference_output(prompt_of(9), 4)
    assert_all_returned(pair)


def test_memory_is_asked_back_also_where_the_clients_leg_has_not_come() -> None:
    pair = SimPair(max_total_tokens=80, enable_priority_scheduling=True)
    submit(pair, "r1", prompt_of(1), room=1)
    submit(pair, "r2", prompt_of(2), room=2, legs=("decode",))
    hold_back_prefill(pair)
    submit(pair, "high", prompt_of(9), room=9, priority=50)
    pair.now += STALL_SECONDS
    hold_back_prefill(pair)
    assert states(pair)["r2"] == "QUEUED"
    assert len(pair.prefill.senders._rooms.unclaimed) == 1
    submit(pair, "r2", prompt_of(2), room=2, legs=("prefill",))
    run_until_idle(pair)
    assert pair.decode.tokens["r2"] == reference_output(prompt_of(2), 4)
    assert_all_returned(pair)


@pytest.mark.parametrize("answers", [False, True], ids=["leg missing", "forecast under way"])
def test_a_reservation_that_waits_for_a_forecast_is_asked_back(answers: bool) -> None:
    """The prefill makes none before the client's leg is there, and makes one only."""
    pair = SimPair(max_total_tokens=48, disaggregation_threshold="auto", enable_priority_scheduling=True)
    submit(pair, "r1", prompt_of(1), room=1, legs=("prefill", "decode") if answers else ("decode",))
    for _ in range(3):
        pair.advance()
        while pair.to_prefill:
            pair.deliver_to_prefill()
    assert states(pair) == {"r1": "PREALLOCATED"}
    submit(pair, "local", prompt_of(2, 40), priority=50)
    pair.now += STALL_SECONDS
    pair.advance()
    assert states(pair) == {"r1": "QUEUED"}
    pair.decode.scheduler.check_invariants()
    forecasts = [message for message in pair.to_decode if isinstance(message, Forecast)]
    assert len(forecasts) == answers
    while pair.to_prefill or pair.to_decode:
        (pair.deliver_to_prefill if pair.to_prefill else pair.deliver_to_decode)()
    assert (pair.decode.receivers.rooms[1].there_ms is not None) == answers
    for _ in range(20):
        pair.decode.plan()
        pair.decode.work()
    assert "local" in pair.decode.ends
    if not answers:
        submit(pair, "r1", prompt_of(1), room=1, legs=("prefill",))
    run_until_idle(pair)
    assert pair.decode.tokens["r1"] == reference_output(prompt_of(1), 4)
    assert_all_returned(pair)


def test_what_an_earlier_attempt_was_told_does_nothing_to_the_next() -> None:
    """Its question and the sender's answer name it, and come again."""
    pair = asked_back()
    question = next(message for message in pair.to_prefill if isinstance(message, Withdraw))
    while pair.to_prefill:
        pair.deliver_to_prefill()
    answer = next(message for message in pair.to_decode if isinstance(message, Withdrawn))
    hold_back_prefill(pair)
    run_until_idle(pair, random.Random(5))
    pair.to_prefill += [question, Abort("prefill", question.handover, "late")]
    pair.to_decode.append(answer)
    run_until_idle(pair)
    assert pair.decode.tokens["r2"] == reference_output(prompt_of(2), 4)
    assert_all_returned(pair)


@pytest.mark.parametrize("served", [0, 200], ids=["equal shares", "others had more"])
def test_a_withdrawn_request_has_its_place_among_tenants(served: int) -> None:
    """Its tenant has asked all the time: it is neither behind equals that came later, nor lifted to the clock."""
    sim = both_ways(max_total_tokens=64, fair_scheduling=True)
    planner = sim.scheduler.planner
    claims, shares = planner.claims, planner.waiting.shares
    reqs = [make_req(sim, f"in-{i}", 40, leg="decode") for i in range(3)]
    for i, req in enumerate(reqs):
        req.tenant, req.times.fcfs_time = Tenant(f"tenant-{i}"), i
        planner.came(req)
        claims.add_incoming(req, 0, optional=False)
    assert claims.grant_incoming(1.0) == reqs[:1]
    for i in (1, 2):
        shares.prompt(reqs[i].tenant, i * served)
    sim.scheduler.memory.finish(reqs[0])
    claims.revoked(reqs[0])
    assert list(planner.waiting.order()) == reqs
    assert shares.share(reqs[0].tenant) == (0.0, 0.0)
    for req in reqs:
        planner.ended(req)
    assert not planner.waiting._lanes


@pytest.mark.parametrize(
    ("route", "way"),
    [
        (Route.OUTGOING, "its peer withdrew"),
        (Route.LOCAL, "it could not migrate"),
        (Route.INCOMING, "its KV does not come"),
        (Route.INCOMING, "its KV does not come after a grant"),
    ],
)
def test_a_request_that_was_out_of_the_queue_has_its_place_among_tenants(route: Route, way: str) -> None:
    sim = both_ways(max_total_tokens=64, fair_scheduling=True)
    planner, moves = sim.scheduler.planner, sim.scheduler.peer_requests
    waiting = planner.waiting
    first, other = (make_req(sim, f"r{i}", 40, leg="decode") for i in range(2))
    first.route = route
    for i, req in enumerate((first, other)):
        req.tenant, req.times.fcfs_time = Tenant(f"tenant-{i}"), i
        sim.scheduler.reqs[req.rid] = planner.came(req)
        if req.route is Route.INCOMING:
            planner.claims.add_incoming(req, 0, optional=False)
        else:
            sim.scheduler.enqueue(req, 1.0)
    waiting.shares.prompt(other.tenant, 400)
    if way == "its peer withdrew":
        moves.take_back(first)
        sim.scheduler.enqueue(first, 2.0)
    elif way == "it could not migrate":
        moves.hold_back(first)
        moves.go_on(first)
    else:
        if way == "its KV does not come after a grant":
            assert planner.claims.grant_incoming(1.0) == [first]
        moves.recompute(first, 2.0)
    assert [req.rid for req in waiting.order()] == ["r0", "r1"]
    assert waiting.shares.share(first.tenant) == (0.0, 0.0)
    for req in (first, other):
        planner.ended(req)
    assert not waiting._lanes


def withdrawn() -> SimPair:
    """Let ``r2`` give its memory back. The prefill has not been told that it is queued anew."""
    pair = asked_back()
    while pair.to_prefill:
        pair.deliver_to_prefill()
    while pair.to_decode:
        pair.deliver_to_decode()
    assert states(pair)["r2"] == "QUEUED"
    return pair


def test_what_waits_in_the_prefills_queue_is_no_transfer_though_it_is_withdrawn() -> None:
    req = withdrawn().decode.scheduler.reqs["r2"]
    assert req.phases.spent(Phase.TRANSFER) == 0
    assert req.phases.spent(Phase.QUEUE, "prefill") >= STALL_SECONDS * 1000


def test_nothing_is_learned_from_a_forecast_whose_prompt_was_withdrawn() -> None:
    pair = asked_back()
    req = pair.decode.scheduler.reqs["r2"]
    req.first_token_estimate = FirstTokenEstimate("prefill", 1.0, 1.0, pair.now)
    while pair.to_prefill:
        pair.deliver_to_prefill()
    while pair.to_decode:
        pair.deliver_to_decode()
    assert req.first_token_estimate is None


def test_an_unasked_answer_takes_no_memory_back() -> None:
    pair = reserved(SimPair(max_total_tokens=80))
    receiver = next(r for r in pair.decode.receivers.rooms.values() if r.req.rid == "r1")
    pair.to_decode.append(Withdrawn("decode", receiver.handover, begun=False))
    while pair.to_decode:
        pair.deliver_to_decode()
    assert states(pair)["r1"] == "TRANSFERRING"
    assert pair.decode.receivers.withdrawn == 0


def test_a_prefill_whose_client_leaves_between_two_attempts_tells_the_next_one() -> None:
    """It has the name of the attempt before, which the decode has left."""
    pair = withdrawn()
    pair.prefill.scheduler.abort(AbortReq("r2", "gone"))
    began = pair.now
    for _ in range(20):
        pair.advance()
        while pair.to_prefill:
            pair.deliver_to_prefill()
        while pair.to_decode:
            pair.deliver_to_decode()
    assert "r2" not in pair.decode.scheduler.reqs
    assert pair.now - began < 1
    run_until_idle(pair, random.Random(6))
    assert_all_returned(pair)


def test_a_request_that_is_withdrawn_has_no_more_time_to_wait_for_memory() -> None:
    pair = withdrawn()
    receiver = pair.decode.receivers.rooms[2]
    pair.now = receiver.queued_at + LIMITS.queue
    pair.advance()
    assert pair.decode.ends["r2"].status == 504
    run_until_idle(pair)
    assert_all_returned(pair)


def test_a_room_without_a_request_that_is_withdrawn_again_and_again_ends() -> None:
    pair = SimPair()
    since, senders = pair.now, pair.prefill.senders
    for attempt in range(1, 4):
        name = named(1, attempt, "decode")
        senders.on_request(pair.peer, TransferRequest("prefill", name, 9, 1, 0, [bytes(12)]), pair.now)
        assert len(senders.rooms) == 1
        pair.now = since + attempt * 0.3 * LIMITS.bootstrap
        senders.on_withdraw(pair.peer, Withdraw("prefill", name), pair.now)
    pair.now = since + 1.1 * LIMITS.bootstrap
    senders.tick(pair.now)
    assert not senders.rooms


@pytest.mark.parametrize("first", [True, False], ids=["first", "behind a hand-over"])
def test_a_reservation_is_asked_back_for_a_local_prompt_of_a_decode(first: bool) -> None:
    """The prefill is slow, and no prompt is computed for a peer here."""
    pair = reserved(SimPair(max_total_tokens=80))
    if not first:
        submit(pair, "next", prompt_of(8), room=8)
    submit(pair, "local", prompt_of(9))
    for _ in range(4):
        pair.now += STALL_SECONDS
        hold_back_prefill(pair)
    assert pair.decode.receivers.withdrawn == 1
    assert list(pair.decode.ends) == ["local"]
    run_until_idle(pair, random.Random(7))
    for number in (1, 2):
        assert pair.decode.tokens[f"r{number}"] == reference_output(prompt_of(number), 4)
    assert_all_returned(pair)


def test_on_a_decode_a_reservation_is_not_asked_back_for_a_local_prompt_of_lower_rank() -> None:
    pair = reserved(SimPair(max_total_tokens=80, enable_priority_scheduling=True), priority=1)
    submit(pair, "local", prompt_of(9))
    for _ in range(4):
        pair.now += STALL_SECONDS
        hold_back_prefill(pair)
    assert pair.decode.receivers.withdrawn == 0
    run_until_idle(pair, random.Random(8))
    assert_all_returned(pair)
