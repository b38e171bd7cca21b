"""Requests that lose their memory in the middle of their prompts, and the one that never does."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.claims import both_ways, make_req, prompt_of
from support.sim import NO_WINDOW, SimInstance, SimWindow, logprob_of, make_generate, make_options, reference_output
from support.sim_tiers import TieredSim

from pdserve.scheduler.req import Req, ReqState, Route, hold_of


def comes(
    sim: SimInstance, rid: str, prompt: list[int], outputs: int, priority: int = 0, key: str = "", **fields: Any
) -> Req:
    """Take in a request that comes after those before."""
    sim.now += 0.0001
    message = make_generate(rid, prompt, max_new_tokens=outputs, **fields)
    message.arrival, message.priority, message.key_name = sim.now, priority, key
    sim.scheduler.arrivals.admit(message, sim.now)
    return sim.scheduler.reqs[rid]


def turn(sim: SimInstance, count: int = 1) -> None:
    for _ in range(count):
        sim.plan()
        sim.scheduler.check_invariants()
        sim.work()


def until_retracted(sim: SimInstance) -> None:
    while not sim.scheduler.planner.retraction.count:
        turn(sim)


def make_sim(**options) -> SimInstance:
    """Make an instance that has memory for about one request, and cuts prompts into small pieces beside decodes."""
    defaults = {"max_total_tokens": 128, "chunked_prefill_size": 16, "mixed_chunk_size": 4, "schedule_policy": "fcfs"}
    return SimInstance(make_options(**defaults | {"schedule_conservativeness": 0.01} | options))


@pytest.mark.parametrize("overlap", [False, True])
def test_the_first_in_order_takes_the_memory_of_a_prompt_in_progress(overlap: bool) -> None:
    sim = make_sim(enable_priority_scheduling=True, disable_overlap_schedule=not overlap)
    high = comes(sim, "high", prompt_of(1, 20), 80, priority=50)
    turn(sim, 6)
    low = comes(sim, "low", prompt_of(2, 88), 4)
    until_retracted(sim)
    assert (high.retractions, low.retractions, low.state) == (0, 1, ReqState.WAITING)
    sim.run_until_idle()
    assert (high.retractions, list(sim.ends)) == (0, ["high", "low"])
    assert sim.tokens["high"] == reference_output(prompt_of(1, 20), 80)
    assert sim.tokens["low"] == reference_output(prompt_of(2, 88), 4)


def test_the_first_is_never_retracted_though_outputs_are_longer_than_was_learned() -> None:
    sim = make_sim(max_total_tokens=256, schedule_conservativeness=1.0, max_running_requests=16)
    for _ in range(60):
        sim.scheduler.planner.claims.admission.lengths.learn(150, 2)
    old = comes(sim, "old", prompt_of(0, 20), 150)
    turn(sim, 4)
    count = 0
    while not old.is_ended:
        while sum(rid.startswith("n") for rid in sim.scheduler.reqs) < 3:
            comes(sim, f"n{count}", prompt_of(count % 40 + 1, 200), 2)
            count += 1
        turn(sim)
    assert old.retractions == 0
    assert sim.scheduler.planner.retraction.count > 0
    assert sim.tokens["old"] == reference_output(prompt_of(0, 20), 150)


def test_with_fair_shares_the_tenant_that_received_least_keeps_its_memory() -> None:
    sim = make_sim(max_total_tokens=96, fair_scheduling=True, chunked_prefill_size=64)
    heavy = comes(sim, "heavy", prompt_of(1, 20), 40, key="heavy")
    light = comes(sim, "light", prompt_of(2, 20), 40, key="light")
    sim.scheduler.planner.waiting.shares.prompt(heavy.tenant, 4000)
    until_retracted(sim)
    assert (heavy.retractions, light.retractions) == (1, 0)
    sim.run_until_idle()


@pytest.mark.parametrize("is_first", [True, False])
def test_a_prompt_for_a_peer_keeps_its_memory(is_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that decodes waits until the prompt's hand-over has ended, whichever came first."""
    sim = both_ways(max_total_tokens=64, chunked_prefill_size=64, schedule_conservativeness=0.01)
    monkeypatch.setattr(sim.scheduler.handovers, "on_prompt_computed", lambda *args: None)
    outgoing = make_req(sim, "outgoing", 36, leg="prefill")
    outgoing.times.fcfs_time = 0.5 if is_first else 5.0
    sim.scheduler.reqs["outgoing"] = sim.scheduler.planner.came(outgoing)
    decoding = comes(sim, "decoding", prompt_of(1, 16), 30)
    turn(sim, 2)
    sim.scheduler.enqueue(outgoing, sim.now)
    turn(sim, 30)
    assert (outgoing.state, outgoing.retractions) == (ReqState.SENDING, 0)
    planner = sim.scheduler.planner
    assert (decoding.retractions, planner.claims.starved, planner.shortage.lacks_memory(sim.now)) == (0, decoding, True)
    assert planner.shortage.stuck is not None
    assert planner.shortage.stuck.req is decoding
    # While it lacks a page, no other request takes one that comes free.
    incoming = make_req(sim, "incoming", 4, leg="decode")
    planner.claims.add_incoming(incoming, 0, optional=False)
    assert planner.grant_incoming(sim.now) == []
    planner.forget("incoming")
    sim.scheduler.leave(outgoing, ReqState.FINISHED)
    sim.run_until_idle()
    assert planner.claims.starved is None
    assert sim.tokens["decoding"] == reference_output(prompt_of(1, 16), 30)


def test_a_long_prompt_in_progress_is_preempted() -> None:
    sim = make_sim(enable_priority_scheduling=True, chunked_prefill_size=8)
    low = comes(sim, "low", prompt_of(2, 100), 4)
    turn(sim, 3)
    assert 0 < low.computed < low.prompt_len
    high = comes(sim, "high", prompt_of(1, 40), 4, priority=50)
    turn(sim)
    assert (low.state, high.state) == (ReqState.WAITING, ReqState.PREFILLING)
    assert sim.scheduler.planner.retraction.preemptions == 1
    sim.run_until_idle()
    assert list(sim.ends) == ["high", "low"]
    assert sim.tokens["low"] == reference_output(prompt_of(2, 100), 4)


def test_a_prompt_that_another_user_pins_is_no_victim() -> None:
    sim = make_sim(disable_overlap_schedule=True)
    old = comes(sim, "old", prompt_of(1, 20), 80)
    turn(sim, 6)
    new = comes(sim, "new", prompt_of(2, 88), 4)
    turn(sim)
    hold = sim.scheduler.memory.pinned.pin(new)
    while not sim.scheduler.planner.shortage.lacks_memory(sim.now):
        sim.plan()
        sim.work()
    assert (old.retractions, new.retractions) == (0, 0)
    sim.scheduler.memory.pinned.unpin(hold)
    sim.run_until_idle()
    assert [sim.tokens[rid] for rid in ("old", "new")] == [
        reference_output(prompt_of(1, 20), 80),
        reference_output(prompt_of(2, 88), 4),
    ]


@pytest.mark.sample(2)
@pytest.mark.parametrize("tiers", [False, True], ids=["pool", "host memory"])
@pytest.mark.parametrize("window", [NO_WINDOW, SimWindow(6, 60)], ids=["all", "window"])
@pytest.mark.parametrize("overlap", [False, True], ids=["one step", "overlap"])
def test_tokens_and_logprobs_are_the_same_wherever_a_prompt_was_cut(overlap: bool, window: SimWindow, tiers: bool):
    options = {"max_total_tokens": 120, "chunked_prefill_size": 8, "schedule_conservativeness": 0.01}
    options |= {"disable_overlap_schedule": not overlap, "enable_priority_scheduling": True, "mixed_chunk_size": 4}
    rng, cut = random.Random(5), 0
    reqs: list[Req] = []
    if tiers:
        sim: SimInstance = TieredSim(200, store=False, window=window, **options)
    else:
        sim = SimInstance(make_options(**options), window=window)
    retract = sim.scheduler.planner.retraction.retract

    def counted(req: Req, now: float) -> None:
        nonlocal cut
        cut += req.state is ReqState.PREFILLING and req.computed > 0
        assert (req.route, hold_of(req).pins) == (Route.LOCAL, 1)
        retract(req, now)

    sim.scheduler.planner.retraction.retract = counted
    for i in range(60):
        prefix = [rng.randrange(2)] * rng.choice([0, 0, 12])
        prompt = [*prefix, *(rng.randrange(97) for _ in range(rng.randrange(1, 70)))]
        outputs, is_fork = rng.randrange(1, 30), rng.random() < 0.2
        for rid in (f"r{i}", f"f{i}")[: 1 + is_fork]:
            fields = {"fork_of": f"r{i}"} if rid != f"r{i}" else {}
            reqs.append(comes(sim, rid, prompt, outputs, rng.choice([0, 0, 50]), logprobs=(0, 0), **fields))
        turn(sim, rng.randrange(9))
    for _ in range(20_000):
        turn(sim)
        if sim.scheduler.is_idle:
            break
    assert cut > 5
    for req in reqs:
        prompt = req.token_ids[: req.prompt_len].tolist()
        assert sim.tokens[req.rid] == reference_output(prompt, req.max_new_tokens)
        assert req.input_logprobs is not None
        assert [one.token_id for one in req.input_logprobs] == prompt
        assert req.input_logprobs[1:] == [logprob_of(token) for token in prompt[1:]]
    sim.scheduler.check_invariants()
