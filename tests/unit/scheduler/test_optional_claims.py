"""Optional claims: requests that may wait for memory without holding up others."""

from __future__ import annotations

import msgspec
import pytest
from support.claims import both_ways, make_req

from pdserve.scheduler.optional_claims import MOST_OPTIONAL
from pdserve.scheduler.req import Req, Route


def test_optional_claims_hold_no_other_up() -> None:
    sim = both_ways(max_total_tokens=64)
    claims = sim.scheduler.planner.claims
    held = make_req(sim, "held", 20, leg="decode")
    optional = make_req(sim, "optional", 60, leg="decode")
    behind = make_req(sim, "behind", 20, leg="decode")
    for req, is_optional in ((held, False), (optional, True), (behind, False)):
        claims.add_incoming(req, 0, optional=is_optional)
    assert claims.grant_incoming(0.0) == [held, behind]
    assert claims.first(0.0) is None


def test_few_optional_claims_that_do_not_fit_are_tried_in_a_turn() -> None:
    sim = both_ways(max_total_tokens=64)
    claims = sim.scheduler.planner.claims
    for i in range(100):
        claims.add_incoming(make_req(sim, f"optional-{i}", 70, leg="decode"), 0, optional=True)
    tries: list[Req] = []
    grant = claims._grant
    claims._grant = lambda req, *args: tries.append(req) or grant(req, *args)  # type: ignore[method-assign]
    assert claims.grant_incoming(0.0) == []
    assert len(tries) == MOST_OPTIONAL


@pytest.mark.parametrize("shares", [False, True], ids=["one line", "fair shares"])
@pytest.mark.parametrize("policy", ["fcfs", "lpm", "srpf"])
def test_of_many_optional_claims_few_are_in_the_order(policy: str, shares: bool) -> None:
    """So thousands, of as many tenants, cost a turn no more. Computing claims behind them have the order they had."""
    sim = both_ways(max_total_tokens=256, schedule_policy=policy, fair_scheduling=shares)
    planner, claims = sim.scheduler.planner, sim.scheduler.planner.claims
    for i in range(100):
        req = make_req(sim, f"optional-{i}", 300, leg="decode")
        req.msg, req.times.fcfs_time = msgspec.structs.replace(req.msg, user=f"user-{i}"), i
        claims.add_incoming(req, 0, optional=True)
    local = [make_req(sim, f"local-{i}", 40, leg="prefill") for i in range(3)]
    for i, req in enumerate(local):
        req.route, req.times.fcfs_time = Route.LOCAL, 100 + i
        planner.waiting.add(req)
    assert len(planner.waiting) == 103
    assert claims.grant_incoming(1.0) == []
    assert claims.first(1.0) is local[0]
    assert list(claims.computing(1.0)) == local
    assert len(list(planner.waiting.order())) == MOST_OPTIONAL + 3
    assert len(planner.waiting._lanes) <= MOST_OPTIONAL + 1
    for rid in list(planner.waiting):
        planner.forget(rid)
    assert not len(planner.waiting)
    assert not planner.waiting._lanes
    assert not planner.waiting._parked


def test_optional_claims_take_the_places_of_those_that_are_over() -> None:
    sim = both_ways(max_total_tokens=64, enable_priority_scheduling=True)
    claims, waiting = sim.scheduler.planner.claims, sim.scheduler.planner.waiting

    def add(rid: str, turn: int, length: int = 70, priority: int = 0) -> Req:
        req = make_req(sim, rid, length, leg="decode")
        req.msg, req.times.fcfs_time = msgspec.structs.replace(req.msg, priority=priority), turn
        claims.add_incoming(req, 0, optional=True)
        return req

    reqs = [add(f"o{i}", i) for i in range(MOST_OPTIONAL + 2)]
    claims.forget("o3")
    assert list(waiting.order()) == reqs[:3] + reqs[4 : MOST_OPTIONAL + 1]
    high = add("high", 99, priority=1)
    assert list(waiting.order()) == [high, *reqs[:3], *reqs[4:MOST_OPTIONAL]]
    claims.forget("high")
    claims.forget("o9")
    assert list(waiting.order()) == reqs[:3] + reqs[4 : MOST_OPTIONAL + 1]


def test_all_optional_claims_that_fit_are_granted_at_once() -> None:
    sim = both_ways(max_total_tokens=1024, max_running_requests=64)
    claims = sim.scheduler.planner.claims
    reqs = [make_req(sim, f"optional-{i}", 10, leg="decode") for i in range(3 * MOST_OPTIONAL)]
    for i, req in enumerate(reqs):
        req.times.fcfs_time = i
        claims.add_incoming(req, 0, optional=True)
    assert claims.grant_incoming(1.0) == reqs
    assert not len(sim.scheduler.planner.waiting)
