"""What a scheduler counts adds up to what clients are told: on one instance, after retractions, over a pair."""

from __future__ import annotations

import random

import pytest
from support.sim import Sent, SimInstance, make_generate, make_options
from support.sim_pair import SimPair, SimSide

from pdserve.messages.metrics import SchedulerMetrics
from pdserve.messages.outputs import ReqMeta, ReqTokens
from pdserve.messages.requests import AbortReq
from pdserve.scheduler.counters import Counters
from pdserve.scheduler.metrics_report import REPORT_SECONDS, MetricsReport, take_metrics
from pdserve.scheduler.req import Req, ReqState, Route


def metas(side: SimInstance) -> list[ReqMeta]:
    """What clients were told, all requests having ended well."""
    ends = list(side.ends.values())
    assert all(isinstance(end, ReqTokens) for end in ends)
    return [end.meta for end in ends]


def told(side: SimInstance, name: str) -> int:
    return sum(getattr(meta, name) for meta in metas(side))


def test_prompts_count_as_they_are_computed_and_hits_as_they_are_found() -> None:
    sim = SimInstance()
    sim.submit("a", range(40), max_new_tokens=3)
    sim.plan()
    assert (take_metrics(sim.scheduler).prompt_tokens, sim.scheduler.counters.finished) == (0, 0)
    sim.work()
    begun = take_metrics(sim.scheduler)
    assert begun.prompt_tokens == 16  # the first piece; the request has barely begun
    sim.run_until_idle()
    sim.submit("b", [*range(20), 7, 7], max_new_tokens=5)
    sim.run_until_idle()
    metrics = take_metrics(sim.scheduler)
    assert sum(begun.step_seconds.counts) == 1  # what was said stays said
    assert (metrics.prompt_tokens, metrics.cached_tokens) == (40 + 2, 20)
    assert metrics.prompt_tokens + metrics.cached_tokens == told(sim, "prompt_tokens")
    assert metrics.cached_tokens == told(sim, "cached_tokens") == metrics.hit_tokens
    assert metrics.asked_tokens == 62
    assert sim.scheduler.counters.generation_tokens == told(sim, "completion_tokens") == 8
    assert sum(metrics.step_seconds.counts) == sim.scheduler.counters.steps > 0
    assert metrics.step_seconds.total == pytest.approx(1e-4 * sim.scheduler.counters.steps)


def test_what_a_retraction_costs_is_no_prompt() -> None:
    sim = SimInstance(make_options(max_total_tokens=64, schedule_conservativeness=0.1))
    for i in range(4):
        sim.submit(f"r{i}", [i, i + 1, i + 2], max_new_tokens=30)
    sim.run_until_idle()
    metrics = take_metrics(sim.scheduler)
    assert metrics.retractions > 0
    assert metrics.recomputed_tokens > 0
    assert metrics.asked_tokens == 12  # that it finds its own again is no hit
    assert metrics.prompt_tokens + metrics.cached_tokens == told(sim, "prompt_tokens") == 12
    assert sim.scheduler.counters.generation_tokens == told(sim, "completion_tokens") == 120


def test_states_show_where_requests_stand_and_go_back_to_zero() -> None:
    sim = SimInstance(make_options(max_running_requests=1))
    sim.submit("a", range(8), max_new_tokens=9)
    sim.submit("b", range(8), max_new_tokens=9)
    while not sim.tokens:
        sim.plan()
        sim.work()
    states = take_metrics(sim.scheduler).states
    assert (states["running"], states["waiting"], sum(states.values())) == (1, 1, 2)
    pool = take_metrics(sim.scheduler).pool
    assert pool.in_use > 0
    assert pool.free + pool.cached + pool.in_use == pool.total == 256
    sim.scheduler.abort(AbortReq(rid=""))
    states = take_metrics(sim.scheduler).states
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
    prefill, decode = take_metrics(pair.prefill.scheduler), take_metrics(pair.decode.scheduler)
    # Clients hear from the decode alone.
    asked, cached = told(pair.decode, "prompt_tokens"), told(pair.decode, "cached_tokens")
    assert prefill.cached_tokens + decode.cached_tokens == cached
    assert prefill.prompt_tokens + decode.prompt_tokens == asked - cached
    assert decode.hit_tokens > decode.cached_tokens  # what it found itself need not travel, and is no client's hit

    def count(side: SimSide, name: str) -> int:
        return getattr(side.scheduler.counters, name)

    assert count(pair.decode, "generation_tokens") == told(pair.decode, "completion_tokens")
    assert count(pair.prefill, "generation_tokens") == count(pair.prefill, "finished") == 0
    assert (count(pair.prefill, "handed_over"), count(pair.decode, "finished")) == (12, 15)
    assert prefill.handovers is not None
    assert decode.handovers is not None
    sent, received = prefill.handovers.sent, decode.handovers.received
    assert (sent.done, prefill.handovers.received.done) == (received.done, decode.handovers.sent.done) == (12, 0)
    assert sent.nbytes == received.nbytes
    # Who is done with the first token is done before its KV has come.
    assert received.nbytes >= sum(m.timing.transfer_bytes for m in metas(pair.decode)) > 0


def test_reports_are_few_while_requests_run_and_prompt_when_the_last_one_ends() -> None:
    sim, sent = SimInstance(), Sent()
    sim.outbox._detokenizer = sent
    report = MetricsReport(sim.scheduler, sim.outbox)

    def turn(now: float) -> list[SchedulerMetrics]:
        report.turn(now)
        sim.outbox.flush()
        said = [m for m in sent.messages if isinstance(m, SchedulerMetrics)]
        sent.messages.clear()
        return said

    assert len(turn(10.0)) == 1
    assert turn(20.0) == []  # nothing has changed
    sim.scheduler.run_steps(20.0)
    sim.submit("a", range(8), max_new_tokens=2)
    [begun] = turn(20.0 + REPORT_SECONDS)
    assert begun.states["waiting"] == 1
    sim.scheduler.run_steps(21.0)
    assert turn(20.0 + 1.9 * REPORT_SECONDS) == []
    while sim.scheduler.reqs:
        sim.scheduler.run_steps(21.0)
        message = sim.to_worker.messages.popleft()
        sim.scheduler.on_step_result(sim.worker.run(message), 21.0)
    [ended] = turn(20.0 + 1.9 * REPORT_SECONDS)
    assert ended.prompt_tokens == 8
    assert not any(ended.states.values())


@pytest.mark.parametrize(("fork_of", "handed_over"), [("", 1), ("first", 0)])
def test_forks_that_a_prefill_ends_at_once_are_no_hand_overs(fork_of: str, handed_over: int) -> None:
    counters = Counters()
    counters.ended(Req.create(make_generate("a", [1], fork_of=fork_of), Route.OUTGOING, ReqState.FINISHED, 1, 1))
    assert counters.handed_over == handed_over
