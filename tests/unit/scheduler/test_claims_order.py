"""The order of claims where reservations are asked back: which one goes first, and which claims wait for how long."""

from __future__ import annotations

import msgspec
import pytest
from support.claims import both_ways, make_req, prompt_of
from support.sim import SimInstance, make_generate

from pdserve.scheduler.claims import STALL_SECONDS
from pdserve.scheduler.fairness import Tenant
from pdserve.scheduler.req import Req, ReqState, Route


def incoming(sim: SimInstance, rid: str, length: int, turn: float, *, priority: int = 0, outputs: int = 4) -> Req:
    """Add a claim for KV that a peer computes."""
    req = make_req(sim, rid, length, leg="decode", outputs=outputs)
    req.msg, req.times.fcfs_time = msgspec.structs.replace(req.msg, priority=priority), turn
    sim.scheduler.planner.claims.add_incoming(req, 0, optional=False)
    return req


def computing(
    sim: SimInstance, rid: str, length: int, turn: float, *, priority: int = 0, outputs: int = 4, local: bool = False
) -> Req:
    """Add a claim for a prompt that is computed here, for a peer unless it is ``local``."""
    req = make_req(sim, rid, length, leg="prefill", outputs=outputs)
    req.msg, req.times.fcfs_time = msgspec.structs.replace(req.msg, priority=priority), turn
    req.route = Route.LOCAL if local else req.route
    sim.scheduler.planner.came(req)
    sim.scheduler.planner.waiting.add(req)
    return req


def reserve(sim: SimInstance, *reqs: Req) -> None:
    """Grant the claims at time 1 and ask their senders for KV then."""
    claims = sim.scheduler.planner.claims
    assert sorted(req.rid for req in claims.grant_incoming(1.0)) == sorted(req.rid for req in reqs)
    for req in reqs:
        claims.requested(req, 1.0)


def give_back(sim: SimInstance, *reqs: Req) -> None:
    """Free the memory of reservations that were asked back, and queue their claims again."""
    for req in reqs:
        sim.scheduler.memory.finish(req)
        req.computed = 0
        sim.scheduler.planner.claims.revoked(req)


def start(sim: SimInstance, req: Req) -> None:
    """Give a computing claim its memory."""
    claims = sim.scheduler.planner.claims
    assert sim.scheduler.memory.admit(req, claims.reserve(req), prefix_limit=0)
    sim.scheduler.planner._admitted(req, 1.0)


PATIENT = 1.0 + 2 * STALL_SECONDS
"""Time at which the patience with reservations of time 1 is over."""


def test_with_fair_shares_the_reservation_of_the_tenant_that_had_most_is_asked_back() -> None:
    """Although it came first."""
    sim = both_ways(max_total_tokens=96, fair_scheduling=True, schedule_conservativeness=0.01)
    shares = sim.scheduler.planner.waiting.shares
    heavy, light = (make_req(sim, key, 40, leg="decode") for key in ("heavy", "light"))
    for turn, req in enumerate((heavy, light)):
        req.tenant, req.times.fcfs_time = Tenant(req.rid), turn
        shares.comes(req.tenant)
        sim.scheduler.planner.claims.add_incoming(req, 0, optional=False)
    shares.output(heavy.tenant, 5000)
    assert list(sim.scheduler.planner.waiting.order()) == [light, heavy]
    reserve(sim, heavy, light)
    computing(sim, "outgoing", 40, 9)
    assert sim.scheduler.planner.claims.to_revoke(PATIENT) == [heavy]


def test_the_reservation_that_the_policy_puts_last_is_asked_back_first() -> None:
    sim = both_ways(max_total_tokens=96, schedule_policy="lof", schedule_conservativeness=0.01)
    short, long = incoming(sim, "short", 40, 0, outputs=2), incoming(sim, "long", 40, 1, outputs=8)
    reserve(sim, short, long)
    computing(sim, "outgoing", 40, 9)
    assert sim.scheduler.planner.claims.to_revoke(PATIENT) == [short]
    assert list(sim.scheduler.planner.waiting) == ["outgoing"]


def test_no_hand_over_passes_a_computing_claim_that_lacks_memory_for_outputs() -> None:
    """Its prompt would fit beside the hand-over, and not the estimated outputs."""
    sim = both_ways(max_total_tokens=256)
    running = computing(sim, "running", 60, 0, outputs=150, local=True)
    start(sim, running)
    large = computing(sim, "large", 100, 1, outputs=200, local=True)
    claims = sim.scheduler.planner.claims
    assert not sim.scheduler.memory.headroom.could_admit(large, claims.reserve(large))
    small = incoming(sim, "small", 8, 2)
    assert claims.grant_incoming(1.0) == []
    sim.scheduler.planner.waiting.remove("large")
    assert claims.grant_incoming(1.0) == [small]


def test_a_computing_claim_that_a_hand_over_passes_still_fits_with_its_outputs() -> None:
    sim = both_ways(max_total_tokens=256, max_running_requests=64)
    start(sim, computing(sim, "running", 8, 0, outputs=2, local=True))
    large = computing(sim, "large", 100, 1, outputs=150, local=True)
    small = [incoming(sim, f"small-{i}", 8, 2 + i, outputs=2) for i in range(20)]
    claims = sim.scheduler.planner.claims
    granted = claims.grant_incoming(1.0)
    assert granted == small[: len(granted)]
    assert 0 < len(granted) < 20
    assert sim.scheduler.memory.headroom.could_admit(large, claims.reserve(large))


SYSTEM = prompt_of(60, 96)
"""What several prompts begin with."""


def alike(sim: SimInstance, rid: str, turn: float, *, starts: bool = False) -> Req:
    """Add a claim for a prompt that begins with ``SYSTEM``, or start it and cache that."""
    prompt = SYSTEM + prompt_of(int(turn), 16)
    message = msgspec.structs.replace(make_generate(rid, prompt, max_new_tokens=4), arrival=turn)
    req = Req.create(message, Route.LOCAL, ReqState.WAITING, 4, 1)
    sim.scheduler.planner.came(req)
    sim.scheduler.planner.waiting.add(req)
    if starts:
        start(sim, req)
        req.computed = len(SYSTEM)
        sim.scheduler.memory.share(req, req.computed)
    return req


@pytest.mark.parametrize("ends", [False, True])
def test_a_prefix_in_use_counts_once_for_the_claims_that_a_hand_over_passes(*, ends: bool) -> None:
    """All of them fit beside it, also if the prefix is evicted before they begin."""
    sim = both_ways(max_total_tokens=304, schedule_conservativeness=0.01, max_running_requests=16)
    runs = alike(sim, "runs", 0, starts=True)
    passed = [alike(sim, f"passed-{turn}", turn) for turn in (1, 2)]
    hand_overs = [incoming(sim, f"incoming-{turn}", 16, turn) for turn in (3, 4, 5, 6, 7, 8)]
    claims, memory = sim.scheduler.planner.claims, sim.scheduler.memory
    full = sum(memory.pool.pages_up(req.known_len) for req in passed)
    assert full > memory.pool.obtainable
    room = memory.pool.obtainable - (full - len(SYSTEM))
    assert [req.rid for req in claims.grant_incoming(9.0)] == [req.rid for req in hand_overs[: room // 16]]
    assert 0 < room // 16 < len(hand_overs)
    if ends:
        sim.scheduler.planner.forget("runs")
        memory.finish(runs)
        memory.pool.cache.reset()
    for req in passed:
        assert memory.admit(req, claims.reserve(req), prefix_limit=req.longest_reusable_prefix)
        sim.scheduler.planner._admitted(req, 9.0)


RANKS = {"enable_priority_scheduling": True, "schedule_conservativeness": 0.01}
LATER = PATIENT + 2 * STALL_SECONDS
"""Time at which no claim is held any more for one that does not fit."""


def test_a_revoked_claim_does_not_yield_while_claims_between_both_are_served() -> None:
    """A stream of them would starve the lower one, and with it the higher one."""
    sim = both_ways(max_total_tokens=128, **RANKS)
    claims = sim.scheduler.planner.claims
    high = incoming(sim, "high", 60, 0, priority=10)
    reserve(sim, high)
    computing(sim, "low", 100, 1, priority=0)
    assert claims.to_revoke(PATIENT) == [high]
    start(sim, computing(sim, "middle-1", 40, 2, priority=5, local=True))
    computing(sim, "middle-2", 40, 3, priority=5, local=True)
    give_back(sim, high)
    assert claims.grant_incoming(LATER) == [high]


def test_a_revoked_claim_does_not_yield_once_a_hand_over_of_a_rank_between_both_has_memory() -> None:
    sim = both_ways(max_total_tokens=128, **RANKS)
    claims = sim.scheduler.planner.claims
    high = incoming(sim, "high", 40, 0, priority=3)
    reserve(sim, high)
    low = computing(sim, "low", 100, 1, priority=0)
    assert claims.to_revoke(PATIENT) == [high]
    start(sim, computing(sim, "middle-1", 50, 2, priority=5, local=True))
    give_back(sim, high)
    assert claims.grant_incoming(LATER) == []
    assert claims.first(LATER) is low
    middle = incoming(sim, "middle-2", 4, 3, priority=5)
    claims.limit.ended("low")
    assert claims.grant_incoming(LATER) == [middle, high]


def test_a_revoked_claim_yields_until_the_other_one_has_memory_though_its_equals_come() -> None:
    sim = both_ways(max_total_tokens=128, **RANKS)
    claims = sim.scheduler.planner.claims
    revoked = incoming(sim, "revoked", 60, 0)
    reserve(sim, revoked)
    outgoing = computing(sim, "outgoing", 100, 1)
    assert claims.to_revoke(PATIENT) == [revoked]
    start(sim, computing(sim, "high", 40, 2, priority=5, local=True))
    give_back(sim, revoked)
    computing(sim, "equal", 4, 3, local=True)
    assert claims.grant_incoming(LATER) == []
    assert next(claims.computing(LATER)) is outgoing


def test_no_claim_yields_to_a_request_that_has_the_rid_of_one_that_is_gone() -> None:
    sim = both_ways(max_total_tokens=128, schedule_conservativeness=0.01)
    planner = sim.scheduler.planner
    revoked = incoming(sim, "revoked", 60, 0)
    reserve(sim, revoked)
    gone = computing(sim, "outgoing", 100, 1)
    assert planner.claims.to_revoke(PATIENT) == [revoked]
    give_back(sim, revoked)
    planner.forget(gone.rid)
    planner.claims.limit.ended(gone.rid)
    computing(sim, "outgoing", 100, 2)
    assert planner.claims.grant_incoming(LATER) == [revoked]


def held() -> tuple[SimInstance, Req, Req]:
    """Let a reservation of high rank be given back for a prompt of low rank, which fits then. Return both."""
    sim = both_ways(max_total_tokens=960, max_running_requests=32, **RANKS)
    high = incoming(sim, "high", 480, 0, priority=10)
    reserve(sim, high)
    low = computing(sim, "low", 500, 1, priority=0)
    assert sim.scheduler.planner.claims.to_revoke(PATIENT) == [high]
    give_back(sim, high)
    return sim, high, low


def test_a_hand_over_that_leaves_the_held_memory_alone_is_granted() -> None:
    sim, _, low = held()
    small = incoming(sim, "small", 40, 2, priority=10)
    assert sim.scheduler.planner.claims.grant_incoming(LATER) == [small]
    assert next(sim.scheduler.planner.claims.computing(LATER)) is low
    start(sim, low)


def test_no_memory_is_held_for_a_claim_that_others_come_before() -> None:
    sim, high, _ = held()
    computing(sim, "middle", 40, 3, priority=5, local=True)
    assert sim.scheduler.planner.claims.grant_incoming(PATIENT) == [high]


def test_no_memory_is_held_for_a_claim_that_is_set_aside() -> None:
    sim, high, low = held()
    sim.scheduler.planner.waiting.set_aside(low)
    assert sim.scheduler.planner.claims.grant_incoming(PATIENT) == [high]


def test_no_memory_is_held_for_a_claim_that_does_not_fit_in_what_is_asked_back() -> None:
    sim = both_ways(max_total_tokens=128, **RANKS)
    claims = sim.scheduler.planner.claims
    begun, stalled = incoming(sim, "begun", 60, 0), incoming(sim, "stalled", 16, 1)
    reserve(sim, begun, stalled)
    claims.began("begun")
    computing(sim, "low", 100, 2, local=True)
    computing(sim, "outgoing", 10, 3)
    assert claims.to_revoke(PATIENT) == []
    high = incoming(sim, "high", 20, 4, priority=10)
    assert claims.grant_incoming(PATIENT) == [high]
