"""What a scheduler counts adds up to what clients are told: on one instance, after retractions, over a pair."""

from __future__ import annotations

import random

import pytest
from support.scrape import Page, families_of, metrics_of, page_of, parts_of, scheduler_metrics
from support.sim import Sent, SimInstance, make_generate, make_options
from support.sim_pair import SimPair, SimSide
from support.sim_tiers import TieredSim
from support.world.node import Node
from support.world.two_rooms import OPTIONS
from support.world.world import World

from pdserve.messages.metrics import SchedulerMetrics
from pdserve.messages.outputs import ReqMeta, ReqTokens
from pdserve.messages.requests import AbortReq
from pdserve.messages.tiers import StoreState
from pdserve.scheduler.counters import Counters
from pdserve.scheduler.features.memory_saver import MemorySaver
from pdserve.scheduler.features.metrics_report import REPORT_SECONDS, MetricsReport, take_metrics
from pdserve.scheduler.features.pressure import PressureMeter
from pdserve.scheduler.req import Req, ReqState, Route


def metas(side: SimInstance) -> list[ReqMeta]:
    """Return the meta data that clients got. All requests must have ended well."""
    ends = list(side.ends.values())
    assert all(isinstance(end, ReqTokens) for end in ends)
    return [end.meta for end in ends]


def reported_sum(side: SimInstance, name: str) -> int:
    return sum(getattr(meta, name) for meta in metas(side))


def computed(page: Page) -> float:
    return page.total("pdserve_prompt_tokens_total", source="computed")


def cached(page: Page) -> float:
    return page.total("pdserve_prompt_tokens_total", source="cached")


def states_on(page: Page) -> dict[str, float]:
    """Return the numbers of requests by state."""
    return {s.labels["state"]: s.value for s in page.samples if s.name == "pdserve_requests"}


def test_prompts_count_as_they_are_computed_and_hits_as_they_are_found() -> None:
    sim = SimInstance()
    sim.submit("a", range(40), max_new_tokens=3)
    sim.plan()
    assert (computed(metrics_of(sim.scheduler)), sim.scheduler.counters.finished) == (0, 0)
    sim.work()
    begun = take_metrics(sim.scheduler)
    assert computed(page_of(begun)) == 16  # the first piece; the request has barely begun
    sim.run_until_idle()
    sim.submit("b", [*range(20), 7, 7], max_new_tokens=5)
    sim.run_until_idle()
    page = metrics_of(sim.scheduler)
    steps = "pdserve_step_duration_seconds"
    assert page_of(begun).total(f"{steps}_count") == 1  # what was said stays said
    assert (computed(page), cached(page)) == (40 + 2, 20)
    assert computed(page) + cached(page) == reported_sum(sim, "prompt_tokens")
    assert cached(page) == reported_sum(sim, "cached_tokens") == page.total("pdserve_prefix_cache_hit_tokens_total")
    assert page.total("pdserve_prefix_cache_asked_tokens_total") == 62
    assert sim.scheduler.counters.generation_tokens == reported_sum(sim, "completion_tokens") == 8
    assert page.total(f"{steps}_count") == sim.scheduler.counters.steps > 0
    assert page.total(f"{steps}_sum") == pytest.approx(1e-4 * sim.scheduler.counters.steps)


def test_what_a_retraction_costs_is_no_prompt() -> None:
    sim = SimInstance(make_options(max_total_tokens=64, schedule_conservativeness=0.1))
    for i in range(4):
        sim.submit(f"r{i}", [i, i + 1, i + 2], max_new_tokens=30)
    sim.run_until_idle()
    page = metrics_of(sim.scheduler)
    assert page.total("pdserve_retractions_total") > 0
    assert page.total("pdserve_recomputed_tokens_total") > 0
    # That it finds its own again is no hit.
    assert page.total("pdserve_prefix_cache_asked_tokens_total") == 12
    assert computed(page) + cached(page) == reported_sum(sim, "prompt_tokens") == 12
    assert sim.scheduler.counters.generation_tokens == reported_sum(sim, "completion_tokens") == 120


def test_states_show_where_requests_stand_and_go_back_to_zero() -> None:
    sim = SimInstance(make_options(max_running_requests=1))
    sim.submit("a", range(8), max_new_tokens=9)
    sim.submit("b", range(8), max_new_tokens=9)
    while not sim.tokens:
        sim.plan()
        sim.work()
    page = metrics_of(sim.scheduler)
    states = states_on(page)
    assert (states["running"], states["waiting"], sum(states.values())) == (1, 1, 2)
    pool = "pdserve_kv_pool_tokens"
    assert page.total(pool, state="in_use") > 0
    assert {s.labels["state"] for s in page.samples if s.name == pool} == {"free", "cached", "in_use"}
    assert page.total(pool) == page.total("pdserve_kv_pool_size_tokens") == 256
    sim.scheduler.abort(AbortReq(rid=""))
    states = states_on(metrics_of(sim.scheduler))
    assert (set(states.values()), "running" in states) == ({0}, True)
    assert sim.scheduler.counters.aborted == 2


@pytest.mark.parametrize("seed", range(5))
def test_a_pair_counts_each_token_once(seed: int) -> None:
    rng = random.Random(seed)
    pair = SimPair(max_total_tokens=512)
    for i in range(12):
        # Prefixes that both, either or neither have: a decode may hold what its prefill has not.
        prompt = [*range(rng.choice((0, 8, 16))), *(rng.randrange(9) for _ in range(rng.randint(1, 20)))]
        pair.submit(f"r{i}", prompt, i + 1, max_new_tokens=rng.randint(1, 9))
        if i % 4 == 0:
            pair.decode.submit(f"alone{i}", prompt, max_new_tokens=4)
        for _ in range(rng.randint(0, 300)):
            rng.choice(pair.moves())()
    while not pair.is_idle:
        rng.choice(pair.moves())()
    prefill, decode = metrics_of(pair.prefill.scheduler), metrics_of(pair.decode.scheduler)
    # Clients hear from the decode alone.
    asked, found = reported_sum(pair.decode, "prompt_tokens"), reported_sum(pair.decode, "cached_tokens")
    assert cached(prefill) + cached(decode) == found
    assert computed(prefill) + computed(decode) == asked - found
    # What it found itself need not travel, and is no client's hit.
    assert decode.total("pdserve_prefix_cache_hit_tokens_total") > cached(decode)

    def count(side: SimSide, name: str) -> int:
        return getattr(side.scheduler.counters, name)

    assert count(pair.decode, "generation_tokens") == reported_sum(pair.decode, "completion_tokens")
    assert count(pair.prefill, "generation_tokens") == count(pair.prefill, "finished") == 0
    assert (count(pair.prefill, "handed_over"), count(pair.decode, "finished")) == (12, 15)

    def done(page: Page, direction: str) -> float:
        return page.total(f"pdserve_handovers_{direction}_total", outcome="done")

    assert (done(prefill, "sent"), done(prefill, "received")) == (12, 0)
    assert (done(decode, "received"), done(decode, "sent")) == (12, 0)
    received = decode.total("pdserve_kv_received_bytes_total")
    assert prefill.total("pdserve_kv_sent_bytes_total") == received
    # A request that needs only the first token ends before its KV has come.
    assert received >= sum(m.timing.transfer_bytes for m in metas(pair.decode)) > 0


def test_reports_are_few_while_requests_run_and_prompt_when_the_last_one_ends() -> None:
    sim, sent = SimInstance(), Sent()
    sim.outbox._detokenizer = sent
    report = MetricsReport(sim.scheduler, [])

    def turn(now: float) -> list[SchedulerMetrics]:
        report.tick(now)
        sim.outbox.flush()
        said = [m for m in sent.messages if isinstance(m, SchedulerMetrics)]
        sent.messages.clear()
        return said

    assert len(turn(10.0)) == 1
    assert turn(20.0) == []  # nothing has changed
    sim.scheduler.run_steps(20.0)
    sim.submit("a", range(8), max_new_tokens=2)
    [begun] = turn(20.0 + REPORT_SECONDS)
    assert states_on(page_of(begun.families))["waiting"] == 1
    sim.scheduler.run_steps(21.0)
    assert turn(20.0 + 1.9 * REPORT_SECONDS) == []
    while sim.scheduler.reqs:
        sim.scheduler.run_steps(21.0)
        message = sim.to_worker.messages.popleft()
        sim.scheduler.on_step_result(sim.worker.run(message), 21.0)
    [ended] = turn(20.0 + 1.9 * REPORT_SECONDS)
    assert computed(page_of(ended.families)) == 8
    assert not any(states_on(page_of(ended.families)).values())


@pytest.mark.parametrize(("fork_of", "handed_over"), [("", 1), ("first", 0)])
def test_forks_that_a_prefill_ends_at_once_are_no_hand_overs(fork_of: str, handed_over: int) -> None:
    counters = Counters()
    counters.ended(Req.create(make_generate("a", [1], fork_of=fork_of), Route.OUTGOING, ReqState.FINISHED, 1, 1))
    assert counters.handed_over == handed_over


def test_every_declared_metric_is_reported() -> None:
    tiered, world = TieredSim(kv_debug=True), World()
    node = Node(world, "d", 9001, make_options(**(OPTIONS | {"disaggregation_mode": "decode"})), lets_go=False)
    tiered.submit("a", range(8), max_new_tokens=2)
    tiered.run_until_idle()
    tiered.tiers.store.state = StoreState("closed", "", pages=1, nbytes=1)  # a store that can say what it holds
    sent = Sent()
    tiered.outbox._detokenizer = sent
    meters = [PressureMeter(tiered.scheduler.memory.pool, tiered.scheduler.planner), MemorySaver(tiered.scheduler)]
    MetricsReport(tiered.scheduler, [*parts_of(tiered.scheduler), *meters]).tick(0.0)
    tiered.outbox.flush()
    reported = {
        f.info.name for report in sent.messages if isinstance(report, SchedulerMetrics) for f in report.families
    }
    reported |= {family.info.name for family in families_of(node.scheduler)}
    assert reported == {family.info.name for family in scheduler_metrics().families}
