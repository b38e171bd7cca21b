"""The limit of reserved memory, so that the largest prompt for a peer can always be computed."""

from __future__ import annotations

import msgspec
import pytest
from support.claims import both_ways, make_req
from support.sim import SimInstance, SimWindow, make_options

from pdserve.scheduler.claims import STALL_SECONDS
from pdserve.scheduler.req import Req, Route


def test_reservations_leave_room_for_the_largest_prompt_that_is_computed_for_a_peer() -> None:
    sim = both_ways(max_total_tokens=128)
    claims = sim.scheduler.planner.claims
    outgoing = make_req(sim, "outgoing", 60, leg="prefill")
    claims.limit.came(outgoing)
    incoming = [make_req(sim, f"in-{i}", 30, leg="decode") for i in range(3)]
    for req in incoming:
        claims.add_incoming(req, 0, optional=False)
    # 32 each: beside 60 of the pool's 128 there is room for two.
    assert claims.grant_incoming(0.0) == incoming[:2]
    assert claims.grant_incoming(0.0) == []
    assert claims.first(0.0) is None
    claims.began(incoming[0].rid)
    assert claims.grant_incoming(0.0) == incoming[2:]
    for req in incoming:
        claims.forget(req.rid)
        sim.scheduler.memory.finish(req)
    claims.limit.ended(outgoing.rid)
    assert sim.scheduler.memory.pool.obtainable == 128


def test_a_reservation_that_is_alone_may_be_as_large_as_the_pool() -> None:
    sim = both_ways(max_total_tokens=128)
    claims = sim.scheduler.planner.claims
    claims.limit.came(make_req(sim, "outgoing", 100, leg="prefill"))
    large = make_req(sim, "large", 120, leg="decode")
    claims.add_incoming(large, 0, optional=False)
    assert claims.grant_incoming(0.0) == [large]


@pytest.mark.parametrize("before", [0, 80], ids=["first", "behind a long local one"])
def test_a_cycle_that_the_limit_could_not_see_is_broken_and_the_revoked_yield(before: int) -> None:
    """Reservations filled the pool before the first prompt for a peer came, which some peer's reservation waits for.
    It may have to wait behind a local prompt of ``before`` tokens.
    """
    sim = both_ways(max_total_tokens=128, schedule_conservativeness=0.01)
    planner, memory = sim.scheduler.planner, sim.scheduler.memory
    claims, incoming = planner.claims, [make_req(sim, f"in-{i}", 30, leg="decode") for i in range(5)]
    for i, req in enumerate(incoming):
        req.times.fcfs_time = i
        claims.add_incoming(req, 0, optional=False)
    assert claims.grant_incoming(1.0) == incoming[:4]
    for req in incoming[:4]:
        claims.requested(req, 1.0)
    first = outgoing = make_req(sim, "outgoing", 10 if before else 50, leg="prefill")
    outgoing.times.fcfs_time = 9
    planner.came(outgoing)
    planner.waiting.add(outgoing)
    if before:
        first = make_req(sim, "local", before, leg="prefill")
        first.route, first.times.fcfs_time = Route.LOCAL, 8
        planner.waiting.add(first)
    assert claims.to_revoke(1.5) == []
    victims = claims.to_revoke(2.0 + STALL_SECONDS)
    assert victims == (incoming[3:0:-1] if before else incoming[3:1:-1])
    assert claims.to_revoke(2.1 + STALL_SECONDS) == []
    for req in victims:
        memory.finish(req)
        claims.revoked(req)
    assert claims.grant_incoming(4.0) == []
    assert claims.first(4.0) is first
    assert next(claims.computing(4.0)) is first
    assert memory.admit(first, claims.reserve(first), prefix_limit=0)
    planner.forget(first.rid)
    assert [req.rid for req in claims.eligible(4.0)][:2] == [victims[-1].rid, victims[-2].rid]


def test_reservations_do_not_take_the_last_row_from_a_prompt_for_a_peer() -> None:
    sim = both_ways(max_total_tokens=512, max_running_requests=3)
    claims = sim.scheduler.planner.claims
    claims.limit.came(make_req(sim, "outgoing", 20, leg="prefill"))
    incoming = [make_req(sim, f"in-{i}", 20, leg="decode") for i in range(3)]
    for i, req in enumerate(incoming):
        req.times.fcfs_time = i
        claims.add_incoming(req, 0, optional=False)
    assert claims.grant_incoming(0.0) == incoming[:2]


def test_hand_overs_leave_rows_to_local_requests_that_wait_for_compute() -> None:
    sim = both_ways(max_total_tokens=512, max_running_requests=3)
    planner = sim.scheduler.planner
    for i in range(2):
        local = make_req(sim, f"local-{i}", 20, leg="prefill")
        local.route, local.times.fcfs_time = Route.LOCAL, i
        planner.waiting.add(local)
    incoming = [make_req(sim, f"in-{i}", 20, leg="decode") for i in range(2)]
    for i, req in enumerate(incoming):
        req.times.fcfs_time = 5 + i
        planner.claims.add_incoming(req, 0, optional=False)
    assert planner.claims.grant_incoming(0.0) == incoming[:1]


def test_a_claim_that_lacks_windows_within_the_limit_gets_reservations_of_lower_rank() -> None:
    options = make_options(handover="on", max_total_tokens=512, enable_priority_scheduling=True)
    sim = SimInstance(options, window=SimWindow(8, 64))
    claims = sim.scheduler.planner.claims
    claims.limit.came(make_req(sim, "outgoing", 20, leg="prefill"))
    low = [make_req(sim, f"low-{i}", 20, leg="decode") for i in range(6)]
    for i, req in enumerate(low):
        req.times.fcfs_time = i
        claims.add_incoming(req, 0, optional=False)
    granted = claims.grant_incoming(1.0)
    assert 1 < len(granted) < 6
    high = make_req(sim, "high", 20, leg="decode")
    high.msg, high.times.fcfs_time = msgspec.structs.replace(high.msg, priority=1), 9
    claims.add_incoming(high, 0, optional=False)
    assert claims.grant_incoming(1.0) == []
    assert claims.to_revoke(1.0 + STALL_SECONDS) == [granted[-1]]
    sim.scheduler.memory.finish(granted[-1])
    claims.revoked(granted[-1])
    assert claims.grant_incoming(1.0 + STALL_SECONDS) == [high]


def reserve(sim: SimInstance, count: int, length: int = 30) -> list[Req]:
    """Make reservations that were asked for at time 1."""
    claims = sim.scheduler.planner.claims
    incoming = [make_req(sim, f"in-{i}", length, leg="decode") for i in range(count)]
    for i, req in enumerate(incoming):
        req.times.fcfs_time = i
        claims.add_incoming(req, length, optional=False)
    assert claims.grant_incoming(1.0) == incoming
    for req in incoming:
        claims.requested(req, 1.0)
    return incoming


def wait_outgoing(sim: SimInstance, length: int) -> Req:
    """Add a prompt for a peer, which came after the reservations."""
    req = make_req(sim, "outgoing", length, leg="prefill")
    req.times.fcfs_time = 9
    sim.scheduler.planner.came(req)
    sim.scheduler.planner.waiting.add(req)
    return req


def test_a_reservation_that_holds_a_row_and_no_memory_of_its_own_is_asked_back_for_the_row() -> None:
    sim = both_ways(max_total_tokens=512, max_running_requests=1, page_size=4)
    planner = sim.scheduler.planner
    cached = make_req(sim, "cached", 32, leg="decode")
    cached.msg = msgspec.structs.replace(cached.msg, rid="x")
    first = make_req(sim, "cached", 32, leg="prefill")
    assert planner.claims._memory.admit(first, planner.claims.reserve(first), prefix_limit=0)
    first.computed = 32
    planner.claims._memory.finish(first)
    planner.claims.add_incoming(cached, 32, optional=False)
    assert planner.claims.grant_incoming(1.0) == [cached]
    assert cached.reused == 32
    planner.claims.requested(cached, 1.0)
    wait_outgoing(sim, 20)
    assert planner.claims.to_revoke(1.0 + 2 * STALL_SECONDS) == [cached]


def test_a_sender_that_does_not_answer_is_asked_once_and_others_are_asked_then() -> None:
    sim = both_ways(max_total_tokens=128, schedule_conservativeness=0.01)
    incoming = reserve(sim, 4)
    wait_outgoing(sim, 30)
    claims, asked, now = sim.scheduler.planner.claims, [], 1.0
    while len(asked) < 4 and now < 20:
        now += STALL_SECONDS / 2
        asked += claims.to_revoke(now)
    assert sorted(req.rid for req in asked) == [req.rid for req in incoming]


def test_each_time_that_a_request_gives_memory_back_it_may_keep_it_longer() -> None:
    sim = both_ways(max_total_tokens=64, schedule_conservativeness=0.01)
    (victim,) = reserve(sim, 1, 50)
    planner = sim.scheduler.planner
    claims, memory, waits = planner.claims, sim.scheduler.memory, []
    for _ in range(4):
        outgoing, since = wait_outgoing(sim, 50), 100.0 * len(waits) + 1
        now = since
        while not claims.to_revoke(now):
            now += STALL_SECONDS / 16
        waits.append(now - since)
        memory.finish(victim)
        claims.revoked(victim)
        planner.ended(outgoing)
        assert claims.grant_incoming(since + 100) == [victim]
        claims.requested(victim, since + 100)
    for times, wait in enumerate(waits):
        assert STALL_SECONDS * 2**times <= wait <= STALL_SECONDS * 2 ** (times + 1) + STALL_SECONDS / 16


def test_incoming_claims_that_lack_memory_for_outputs_yield_to_a_prompt_for_a_peer() -> None:
    """Nothing runs here, the reservation is to write a long output, and its peer waits for what is computed here."""
    sim = both_ways(max_total_tokens=144)
    claims = sim.scheduler.planner.claims
    holder, second = (make_req(sim, rid, 40, leg="decode", outputs=100) for rid in ("holder", "second"))
    for turn, req in enumerate((holder, second)):
        req.times.fcfs_time = turn
        claims.add_incoming(req, 0, optional=False)
    assert claims.grant_incoming(1.0) == [holder]
    claims.requested(holder, 1.0)
    outgoing = wait_outgoing(sim, 20)
    assert next(claims.computing(1.5), None) is None
    assert claims.to_revoke(1.0 + STALL_SECONDS) == []
    assert next(claims.computing(1.0 + STALL_SECONDS), None) is outgoing


def test_nothing_is_granted_to_hand_overs_while_the_only_running_request_lacks_a_page() -> None:
    sim = both_ways(max_total_tokens=128)
    claims = sim.scheduler.planner.claims
    incoming = make_req(sim, "incoming", 30, leg="decode")
    claims.add_incoming(incoming, 0, optional=False)
    claims.starved = make_req(sim, "lone", 30, leg="prefill")
    assert claims.grant_incoming(0.0) == []
    claims.starved = None
    assert claims.grant_incoming(0.0) == [incoming]


def test_a_moved_request_that_is_retracted_depends_on_memory_like_any_other() -> None:
    sim = both_ways(max_total_tokens=64)
    planner, claims = sim.scheduler.planner, sim.scheduler.planner.claims
    moved = make_req(sim, "moved", 20, leg="decode")
    claims.add_incoming(moved, 0, optional=True)
    assert claims.grant_incoming(1.0) == [moved]
    planner.running[moved.rid] = moved
    claims.landed(moved.rid)
    sim.scheduler.memory.finish(moved)
    moved.route, moved.retractions = Route.LOCAL, 1
    planner.waiting.add(moved)
    assert claims.first(1.0) is moved


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "dfs-weight", "srpf", "lof"])
def test_computing_claims_pass_incoming_ones_that_the_limit_holds_up_each_once(policy: str) -> None:
    sim = both_ways(max_total_tokens=128, schedule_policy=policy)
    reserve(sim, 2)
    planner, outgoing = sim.scheduler.planner, []
    for i in range(6):
        req = make_req(sim, f"w{i}", 60, leg="decode" if i % 2 else "prefill")
        req.times.fcfs_time = 10 + i
        if i % 2:
            planner.claims.add_incoming(req, 0, optional=False)
        else:
            planner.came(req)
            planner.waiting.add(req)
            outgoing.append(req)
    assert sorted(req.rid for req in planner.claims.computing(2.0)) == [req.rid for req in outgoing]
    assert planner.claims.first(2.0) in outgoing
