"""Requests that wait for a store: what they cost the plans, and when they come back."""

from __future__ import annotations

import msgspec
import pytest
from support.counted_calls import counted_calls
from support.sim import make_generate
from support.sim_tiers import TieredSim

from pdserve.messages.requests import AbortReq
from pdserve.scheduler import store_link
from pdserve.scheduler.store_link import LONGEST_WAIT

PAGES = 4
PAGE = 4
TICK = 0.001


@pytest.fixture(autouse=True)
def _small_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_link, "LEAST_FETCH", 2 * PAGE)


def make_sim(users: int, **options) -> TieredSim:
    """Make an instance on which one request decodes, and one of each user waits for a store."""
    sim = TieredSim(4 * PAGES * users, max_total_tokens=2048, max_queued_requests=2 * users, **options)
    sim.submit("decodes", [1, 2, 3], max_new_tokens=60)
    tick(sim)
    for i in range(users):
        comes(sim, i)
    assert sim.tiers.store.fetching == users
    return sim


def comes(sim: TieredSim, user: int, rid: str = "") -> None:
    prompt = [(31 * user + 7 * i) % 89 + 3 for i in range(PAGES * PAGE + 1)]
    message = make_generate(rid or f"r{user}", prompt, max_new_tokens=2)
    sim.now += 1e-4
    sim.scheduler.arrivals.admit(msgspec.structs.replace(message, arrival=sim.now, user=f"user {user}"), sim.now)


def tick(sim: TieredSim) -> None:
    """Plan, and let the worker do everything but what the store was asked for. The clock moves on by ``TICK``."""
    sim.plan()
    while sim.work():
        pass


def is_waiting(sim: TieredSim, *rids: str) -> bool:
    return all(rid in sim.scheduler.planner.waiting for rid in rids)


@pytest.mark.parametrize("policy", ["fcfs", "srpf", "dfs-weight"])
@pytest.mark.parametrize("fair_scheduling", [False, True])
def test_a_plan_costs_as_much_however_many_requests_wait_for_a_store(policy: str, *, fair_scheduling: bool) -> None:
    def calls_of_plans(users: int) -> int:
        sim = make_sim(users, schedule_policy=policy, fair_scheduling=fair_scheduling)
        tick(sim)
        planner = sim.scheduler.planner
        with counted_calls() as calls:
            assert planner.plan(sim.now) is not None
            assert not planner.shortage.lacks_memory(sim.now)
        assert is_waiting(sim, *(f"r{i}" for i in range(users)))
        return calls[0]

    assert calls_of_plans(120) == calls_of_plans(12)


def test_a_request_is_admitted_in_the_tick_after_its_fetch_has_ended() -> None:
    sim = make_sim(3, fair_scheduling=True)
    tick(sim)
    sim.serve_store()
    assert is_waiting(sim, "r0", "r1", "r2")
    tick(sim)
    assert not is_waiting(sim, "r0")
    assert is_waiting(sim, "r1", "r2")
    sim.settle()
    assert {"r0", "r1", "r2"} <= sim.ends.keys()


def test_a_request_is_admitted_when_its_patience_is_over() -> None:
    sim = make_sim(1)
    asked_at = sim.now
    tick(sim)
    sim.now = asked_at + LONGEST_WAIT - 1.5 * TICK
    tick(sim)
    assert is_waiting(sim, "r0")
    tick(sim)
    assert not is_waiting(sim, "r0")
    sim.settle()  # the late answer concerns no request


def test_a_request_that_waits_for_a_store_keeps_its_place() -> None:
    sim = make_sim(1, fair_scheduling=True)
    shares, tenant = sim.scheduler.planner.waiting.shares, sim.scheduler.reqs["r0"].tenant
    tick(sim)
    share = shares.share(tenant)
    shares.prompt(sim.scheduler.reqs["decodes"].tenant, 500)
    comes(sim, 0, "again")
    assert shares.share(tenant)[1] == share[1]  # it has not been idle
    sim.serve_store()
    assert [req.rid for req in sim.scheduler.planner.waiting.order()] == ["r0", "again"]


def test_the_fetch_of_an_earlier_request_ends_no_wait() -> None:
    sim = make_sim(1)
    tick(sim)
    sim.scheduler.abort(AbortReq("r0"))
    tick(sim)
    del sim.ends["r0"]
    sim.now += 1
    comes(sim, 7, "r0")
    asked_at = sim.now
    tick(sim)
    sim.serve_store()
    sim.now = asked_at + LONGEST_WAIT - 1.5 * TICK  # the wait of the earlier one is over, too
    tick(sim)
    assert is_waiting(sim, "r0")
    sim.serve_store()
    tick(sim)
    assert not is_waiting(sim, "r0")
    sim.settle()
