"""Order of waiting requests: priorities and preemption, fair shares, common prefixes, deadlines, a full queue."""

from __future__ import annotations

import gc
import math
import random
import weakref
from collections import Counter
from typing import Any

import numpy as np
import pytest
from support.claims import both_ways, make_req
from support.counted_calls import counted_calls
from support.sim import NO_WINDOW, SimInstance, SimWindow, make_generate, make_options, reference_output
from support.sim_machine import Machine, TimedSim
from support.sim_pair import SimPair
from support.sim_pair import assert_all_returned as pair_assert_all_returned
from support.sim_pair import run_until_idle as pair_run_until_idle
from support.sim_tiers import TieredSim

from pdserve.messages.outputs import FinishType, ReqError, ReqTokens
from pdserve.messages.requests import AbortReq
from pdserve.scheduler import deadlines as deadlines_module
from pdserve.scheduler import store_link
from pdserve.scheduler.deadlines import SENDERS_GRACE, Deadlines
from pdserve.scheduler.estimates.queue_rate import QueueRate
from pdserve.scheduler.fairness import Tenant
from pdserve.scheduler.memory_terms import Reserve
from pdserve.scheduler.pace import PaceMeter
from pdserve.scheduler.req import Req, ReqState, Route
from pdserve.scheduler.shared_prompts import LEAST_SHARED, MOST_STANDSTILL, SharedPrompts


def send(sim: SimInstance, rid: str, prompt, *, max_new_tokens: int = 4, **fields) -> None:
    """Submit a request with fields that the builder doesn't know."""
    msg = make_generate(rid, prompt, max_new_tokens=max_new_tokens)
    for name, value in fields.items():
        setattr(msg, name, value)
    msg.arrival = msg.arrival or sim.now
    sim.scheduler.arrivals.admit(msg, sim.now)


def turn(sim: SimInstance, count: int = 1) -> None:
    for _ in range(count):
        sim.plan()
        sim.scheduler.check_invariants()
        sim.work()


def assert_all_returned(sim: SimInstance) -> None:
    usage = sim.scheduler.memory.pool.usage()
    assert (usage["in_use"], usage["rows_in_use"]) == (0, 0)
    sim.scheduler.check_invariants()


# --- priorities ---


def test_no_request_follows_a_prompt_of_lower_priority() -> None:
    """A request that waits for the prompt of another one gets on at its pace."""
    options = make_options(
        **{"page_size": 16, "max_total_tokens": 1 << 16, "max_running_requests": 512, "chunked_prefill_size": 512},
        itl_budget_ms=0,
        enable_priority_scheduling=True,
    )
    rng = random.Random(1)
    same = [rng.randrange(97) for _ in range(8000)]

    def steps_until_first_token(prompt: list[int]) -> int:
        sim = SimInstance(options, context_length=1 << 15)
        send(sim, "low", [*same, 1], max_new_tokens=1)
        turn(sim)
        send(sim, "high", prompt, max_new_tokens=1, priority=100)
        for steps in range(100):
            if "high" in sim.tokens:
                return steps
            # Nearly all of each step goes to those between the two.
            send(sim, f"between{steps}", [rng.randrange(97) for _ in range(496)], max_new_tokens=1, priority=50)
            turn(sim)
        raise AssertionError("no first token")

    alone = steps_until_first_token([rng.randrange(97) for _ in range(8001)])
    assert steps_until_first_token([*same, 2]) <= alone


@pytest.mark.parametrize("low_first", [False, True])
@pytest.mark.parametrize("policy", ["priority", "lpm", "srpf"])
def test_priorities_come_before_the_policy(policy: str, low_first: bool):
    options = make_options(
        schedule_policy=policy,
        enable_priority_scheduling=policy != "priority",
        schedule_low_priority_values_first=low_first,
        max_running_requests=1,
    )
    sim = SimInstance(options)
    send(sim, "first", [9])
    turn(sim)
    for i, priority in enumerate([0, 5, -3, 5]):
        send(sim, f"r{i}", [i, 2, 3], priority=priority)
    sim.run_until_idle()
    order = ["r1", "r3", "r0", "r2"] if not low_first else ["r2", "r0", "r1", "r3"]
    assert list(sim.ends) == ["first", *order]


def test_without_priorities_they_do_not_count():
    sim = SimInstance(make_options(max_running_requests=1))
    for i in range(4):
        send(sim, f"r{i}", [i], priority=i)
    sim.run_until_idle()
    assert list(sim.ends) == ["r0", "r1", "r2", "r3"]


@pytest.mark.parametrize(("threshold", "preempted"), [(4, 1), (5, 0)])
def test_a_far_higher_priority_takes_the_memory_of_lower_ones(threshold: int, preempted: int):
    sim = SimInstance(
        make_options(
            max_total_tokens=64,
            enable_priority_scheduling=True,
            priority_scheduling_preemption_threshold=threshold,
            schedule_conservativeness=0.01,
        )
    )
    for i in range(3):
        send(sim, f"low{i}", [i] * 12, max_new_tokens=6, priority=0)
    turn(sim, 3)
    running = set(sim.scheduler.planner.running)
    send(sim, "high", [50] * 30, max_new_tokens=4, priority=5)
    while "high" not in sim.ends and len(sim.ends) < 3:
        turn(sim)
    assert sim.scheduler.planner.retraction.preemptions == preempted
    assert ("high" in sim.ends) is (preempted > 0)
    sim.run_until_idle()
    assert running == {"low0", "low1", "low2"}
    for i in range(3):
        assert sim.tokens[f"low{i}"] == reference_output([i] * 12, 6)
    assert sim.tokens["high"] == reference_output([50] * 30, 4)
    assert_all_returned(sim)


def test_no_request_is_retracted_for_one_that_waits_for_the_store(monkeypatch):
    before = TieredSim(200)
    before.submit("a", [50] * 30, max_new_tokens=4)
    before.settle()
    options = {"max_total_tokens": 64, "schedule_policy": "priority", "schedule_conservativeness": 0.01}
    sim = TieredSim(200, kept=before.store.kept, **options)

    def turns(count: int) -> None:
        for _ in range(count):
            sim.plan()
            while sim.work():
                pass

    for i in range(3):
        send(sim, f"low{i}", [i] * 12, max_new_tokens=9)
    turns(2)
    monkeypatch.setattr(store_link, "LEAST_FETCH", 4)
    send(sim, "high", [50] * 30, max_new_tokens=4, priority=50)
    turns(2)
    assert sim.scheduler.planner.running.keys() == {"low0", "low1", "low2"}
    assert sim.scheduler.planner.retraction.preemptions == 0
    while sim.serve_store():
        pass
    turns(1)
    assert sim.scheduler.planner.retraction.preemptions > 0
    sim.settle()
    assert sim.tokens["high"] == reference_output([50] * 30, 4)
    assert sim.ends["high"].meta.cached_tokens


def test_no_request_is_preempted_in_vain():
    sim = SimInstance(make_options(max_total_tokens=64, schedule_policy="priority"))
    send(sim, "equal", [1] * 24, max_new_tokens=20, priority=50)
    send(sim, "low", [2] * 8, max_new_tokens=20, priority=0)
    turn(sim, 3)
    send(sim, "high", [50] * 50, max_new_tokens=4, priority=50)
    turn(sim, 5)
    assert sim.scheduler.planner.retraction.preemptions == 0  # what the low one has would not do
    sim.run_until_idle()
    assert sim.tokens["high"] == reference_output([50] * 50, 4)


def test_no_request_is_preempted_if_others_still_keep_memory_for_their_output():
    options = {"max_total_tokens": 256, "schedule_policy": "priority", "chunked_prefill_size": 256}
    sim = SimInstance(make_options(**options, priority_scheduling_preemption_threshold=5))
    send(sim, "middle", [1] * 20, max_new_tokens=200, priority=5)
    send(sim, "low", [2] * 40, max_new_tokens=60, priority=0)
    turn(sim, 5)
    send(sim, "high", [50] * 120, max_new_tokens=100, priority=8)
    turn(sim, 4)
    # Without the low one, the high one would not fit beside the estimated output of the middle one.
    assert sim.scheduler.planner.running.keys() == {"middle", "low"}
    assert sim.scheduler.planner.retraction.preemptions == 0
    sim.run_until_idle()
    assert_all_returned(sim)


def test_output_of_the_preempted_needs_no_room_beside_the_request_that_takes_its_memory():
    sim = SimInstance(make_options(max_total_tokens=256, schedule_policy="priority", chunked_prefill_size=256))
    send(sim, "low", [2] * 40, max_new_tokens=200, priority=0)
    turn(sim, 5)
    send(sim, "high", [50] * 160, max_new_tokens=40, priority=50)
    turn(sim, 2)
    assert sim.scheduler.planner.running.keys() == {"high"}
    assert sim.scheduler.planner.retraction.preemptions == 1
    sim.run_until_idle()
    assert sim.tokens["low"] == reference_output([2] * 40, 200)


@pytest.mark.parametrize(("shared", "preempted"), [(160, 0), (0, 1)])
def test_what_a_request_shares_with_running_ones_needs_no_preemption(shared: int, preempted: int):
    sim = SimInstance(make_options(max_total_tokens=256, schedule_policy="priority", chunked_prefill_size=256))
    system = [7] * 160
    send(sim, "low", [*system, 1, 2, 3, 4], max_new_tokens=40, priority=0)
    turn(sim, 4)
    prompt = [*system[:shared], *[50] * (176 - shared)]
    send(sim, "high", prompt, max_new_tokens=4, priority=50)
    turn(sim)
    assert "high" in sim.scheduler.planner.running
    assert sim.scheduler.planner.retraction.preemptions == preempted
    sim.run_until_idle()
    assert sim.tokens["high"] == reference_output(prompt, 4)
    assert_all_returned(sim)


@pytest.mark.parametrize(("sharer", "left"), [("equal", "equal high"), ("low", "equal low")])
def test_a_prefix_counts_once_whether_a_victim_or_another_has_it(sharer: str, left: str):
    """If the low one has the prefix, it frees the memory, and the high one takes it. Both together would not fit."""
    options = {"max_total_tokens": 200, "schedule_policy": "priority", "schedule_conservativeness": 0.01}
    sim = SimInstance(make_options(**options, chunked_prefill_size=256))
    system = [7] * 80
    for rid, priority in (("equal", 50), ("low", 0)):
        send(sim, rid, [*system, 1] if rid == sharer else [2] * 60, max_new_tokens=40, priority=priority)
    turn(sim, 4)
    send(sim, "high", [*system, *[9] * 80], max_new_tokens=4, priority=50)
    turn(sim)
    assert sim.scheduler.planner.running.keys() == set(left.split())
    assert sim.scheduler.planner.retraction.preemptions == (sharer == "equal")
    sim.run_until_idle()
    assert_all_returned(sim)


@pytest.mark.parametrize("window", [NO_WINDOW, SimWindow(8, 160)])
def test_what_is_said_of_a_prompt_that_would_fit_is_what_happens(window: SimWindow, monkeypatch: pytest.MonkeyPatch):
    options = {"max_total_tokens": 192, "enable_priority_scheduling": True, "chunked_prefill_size": 32}
    sim, rng, outcomes = SimInstance(make_options(**options), window=window), random.Random(3), Counter()
    memory = sim.scheduler.memory
    admit, headroom = memory.admit, memory.headroom

    def compared(req: Req, reserve: Reserve, **fields: Any) -> bool:
        expected = headroom.could_admit(req, reserve)
        shared = headroom._shared_len(req)
        is_in = admit(req, reserve, **fields)
        assert is_in is expected
        outcomes[is_in, shared > 0] += 1
        return is_in

    monkeypatch.setattr(memory, "admit", compared)
    for i in range(150):
        prefix = [rng.randrange(3)] * rng.randrange(60)
        prompt = [*prefix, *(rng.randrange(97) for _ in range(rng.randrange(1, 40)))]
        send(sim, f"r{i}", prompt, max_new_tokens=rng.randrange(1, 40), priority=rng.choice([0, 0, 50]))
        turn(sim, rng.randrange(8))
    sim.run_until_idle()
    assert len(outcomes) == 4, outcomes
    assert_all_returned(sim)


# --- fair shares: more in test_fairness.py ---


def flood(fair: bool) -> Counter[str]:
    """Let one key ask for a hundred answers at once, and another one for ten after that.

    Returns their answers by half time.
    """
    options = make_options(fair_scheduling=fair, schedule_policy="fcfs", max_running_requests=2, max_total_tokens=512)
    sim = SimInstance(options)
    for i in range(100):
        send(sim, f"greedy{i}", [i, 1, 2], key_name="greedy", user=f"u{i}")
    for i in range(10):
        send(sim, f"modest{i}", [i, 3, 4], key_name="modest")
    while len(sim.ends) < 20:
        turn(sim)
    done = Counter(rid.rstrip("0123456789") for rid in sim.ends)
    sim.run_until_idle()
    assert len(sim.ends) == 110
    return done


def test_keys_that_compete_get_as_much_however_many_users_they_name():
    assert abs(flood(True)["modest"] - 10) <= 1
    assert flood(False)["modest"] == 0


def test_long_outputs_are_paid_for():
    """Counters are of tokens, not of requests: a key with answers of 30 tokens gets fewer than one with
    answers of 3.
    """
    sim = SimInstance(make_options(fair_scheduling=True, max_running_requests=1, max_total_tokens=512))
    for i in range(40):
        send(sim, f"long{i}", [i, 1], max_new_tokens=30, key_name="l")
        send(sim, f"short{i}", [i, 2], max_new_tokens=3, key_name="s")
    while len(sim.ends) < 30:
        turn(sim)
    done = Counter(rid.rstrip("0123456789") for rid in sim.ends)
    assert done["short"] > 5 * done["long"]
    sim.scheduler.abort(AbortReq(""))
    sim.run_until_idle()
    assert_all_returned(sim)


# --- prompts that begin alike ---


def alike(count: int, **options) -> TimedSim:
    curve = Machine(read_ms=5.0, token_ms=0.25)
    sim = TimedSim(curve, chunked_prefill_size=4096, itl_budget_ms=0, **options)
    common = np.arange(1024) % 97
    for i in range(count):
        sim.submit(f"r{i}", [*common, i, 1, 2, 3], max_new_tokens=2)
    return sim


def test_prompts_that_begin_alike_are_computed_once():
    sim = alike(8)
    sim.run_until_idle()
    common = list(np.arange(1024) % 97)
    for i in range(8):
        assert sim.tokens[f"r{i}"] == reference_output([*common, i, 1, 2, 3], 2)
    assert sim.scheduler.counters.prompt_tokens == 1024 + 8 * 4
    assert sim.scheduler.planner.shared_prompts.set_aside == 7
    assert_all_returned(sim)


@pytest.mark.parametrize("when", [0, 1])
def test_followers_go_on_when_the_first_is_aborted(when: int):
    sim = alike(4)
    for _ in range(when):
        sim.plan()
        sim.work()
    sim.scheduler.abort(AbortReq("r0"))
    sim.run_until_idle()
    assert {rid for rid, end in sim.ends.items() if end.finish.type is FinishType.LENGTH} == {"r1", "r2", "r3"}
    assert sim.scheduler.counters.prompt_tokens <= 1024 + 4 * 4
    assert_all_returned(sim)


def test_without_a_cache_no_request_waits_for_another():
    sim = alike(3, disable_radix_cache=True)
    sim.run_until_idle()
    assert sim.scheduler.planner.shared_prompts.set_aside == 0
    assert len(sim.ends) == 3


def prefilling(rid: str, prompt, computed: int) -> Req:
    req = Req.create(make_generate(rid, prompt), Route.LOCAL, ReqState.PREFILLING, 8, 1)
    req.computed = computed
    return req


def test_the_wait_for_a_prompt_that_stands_still_ends():
    class Hold:
        cached_len, verified = 0, True

    first, second = prefilling("a", range(400), 0), prefilling("b", range(400), 0)
    first.hold = Hold()
    shared = SharedPrompts(4, enabled=True)
    assert not shared.follows(second, 400 - LEAST_SHARED + 5, [first])  # too little is left to share
    assert shared.follows(second, 0, [first])
    waits = 0
    while not (ready := shared.ready()):
        waits += 1
    assert (ready, waits) == ([second], MOST_STANDSTILL - 1)
    # No request waits for it again; for one that moves on they do.
    assert not shared.follows(second, 0, [first])
    assert not shared.ready()
    assert not shared.follows(second, 0, [first])
    first.computed += 1
    assert not shared.ready()
    assert shared.follows(second, 0, [first])
    for _ in range(3 * MOST_STANDSTILL):
        first.computed += 1
        assert not shared.ready()
    first.hold.cached_len = 396
    assert shared.ready() == [second]


@pytest.mark.parametrize("policy", ["lpm", "srpf", "dfs-weight"])
def test_lanes_that_have_no_turn_cost_nothing(policy: str, monkeypatch):
    sim = SimInstance(make_options(schedule_policy=policy, fair_scheduling=True, max_running_requests=1))
    for i in range(20):
        send(sim, f"r{i}", [i] * 6, user=f"u{i // 2}")
    waiting, looked = sim.scheduler.planner.waiting, []
    chooser = waiting.policy.chooser
    monkeypatch.setattr(waiting.policy, "chooser", lambda *args: looked.append(args) or chooser(*args))
    turn(sim)
    assert len(waiting) == 19
    assert len(looked) < 6
    sim.run_until_idle()
    assert len(sim.ends) == 20


@pytest.mark.parametrize("kind", ["incoming", "set aside"])
@pytest.mark.parametrize("policy", ["fcfs", "lpm", "srpf", "dfs-weight"])
def test_lanes_without_a_request_to_try_cost_nothing(policy: str, kind: str) -> None:
    """A client may name a new user with each request, and each step looks for the next request several times."""

    def calls_of_an_order(users: int) -> int:
        sim = both_ways(schedule_policy=policy, fair_scheduling=True)
        waiting = sim.scheduler.planner.waiting
        for i in range(users):
            req = make_req(sim, f"r{i}", 30, leg="decode" if kind == "incoming" else "prefill")
            req.tenant = Tenant("", f"u{i}")
            waiting.add(req)
            if kind == "set aside":
                waiting.set_aside(req)
        only = make_req(sim, "only", 30, leg="prefill")
        waiting.add(only)
        with counted_calls() as calls:
            order = list(waiting.order(computing_only=kind == "incoming"))
        assert order == [only]
        return calls[0]

    # A call for each lane would be 280 more. Some calls differ, such as those of caches that are filled by now.
    assert calls_of_an_order(300) < calls_of_an_order(20) + 20


# --- deadlines ---


def test_requests_that_ended_are_not_kept_until_their_time_comes():
    sim = SimInstance()
    ended = []
    for i in range(300):
        send(sim, f"r{i}", range(3), timeout_s=1e5)
        ended.append(weakref.ref(sim.scheduler.reqs[f"r{i}"].token_ids))
        sim.scheduler.abort(AbortReq(f"r{i}"))
    gc.collect()
    assert sum(tokens() is not None for tokens in ended) <= 2 * deadlines_module.FEW


def test_a_deadline_ends_who_waits_and_who_runs():
    sim = SimInstance(make_options(max_running_requests=1))
    send(sim, "runs", range(5), max_new_tokens=100, timeout_s=0.02)
    send(sim, "waits", range(5), timeout_s=0.01)
    send(sim, "lasts", range(7), timeout_s=1e5)
    sim.run_until_idle()
    runs, waits = sim.ends["runs"], sim.ends["waits"]
    assert isinstance(runs, ReqTokens)
    assert runs.finish.type is FinishType.TIMEOUT
    assert "timeout_s of 0.02 s" in runs.finish.message
    got = sim.tokens["runs"]
    assert 0 < len(got) < 100
    assert got == reference_output(range(5), 100)[: len(got)]
    assert runs.meta.completion_tokens == len(got)
    assert isinstance(waits, ReqError)
    assert (waits.status, waits.kind) == (408, "timeout_error")
    assert "timeout_s of 0.01 s" in waits.message
    assert sim.tokens["lasts"] == reference_output(range(7), 4)
    assert_all_returned(sim)


def test_the_loop_is_woken_for_a_deadline_and_ended_ones_are_forgotten():
    deadlines = Deadlines()
    assert deadlines.seconds_left(5.0) == math.inf

    def req(rid: str, arrival: float, timeout_s: float) -> Req:
        msg = make_generate(rid, range(3))
        msg.arrival, msg.timeout_s = arrival, timeout_s
        return Req.create(msg, Route.LOCAL, ReqState.WAITING, 8, 1)

    late, early, none = req("a", 1.0, 10.0), req("b", 2.0, 3.0), req("c", 0.0, 0.0)
    for one in (late, early, none):
        deadlines.add(one)
    assert deadlines.seconds_left(4.0) == 1.0
    assert deadlines.pop(4.9) == []
    assert deadlines.pop(5.0) == [early]
    late.state = ReqState.FINISHED
    assert deadlines.pop(5.0) == []
    assert deadlines.seconds_left(5.0) == math.inf
    assert deadlines.expired == 1


def test_who_answers_says_when_the_time_is_over_and_its_sender_only_later():
    deadlines = Deadlines()
    msg = make_generate("a", range(3))
    msg.arrival, msg.timeout_s = 1.0, 2.0
    sender, receiver = (Req.create(msg, route, ReqState.WAITING, 8, 1) for route in (Route.OUTGOING, Route.INCOMING))
    deadlines.add(sender)
    deadlines.add(receiver)
    assert deadlines.pop(3.0) == [receiver]
    assert deadlines.pop(3.0 + SENDERS_GRACE) == [sender]


def test_both_legs_of_a_pair_end_at_the_deadline_and_give_everything_back():
    seen = set()
    for seed in range(24):
        pair = SimPair(max_total_tokens=256, chunked_prefill_size=8)
        for side in (pair.prefill, pair.decode):
            msg = make_generate("a", range(60), max_new_tokens=60, room=7)
            msg.arrival, msg.timeout_s = side.now, 0.002 * (seed + 1)
            side.scheduler.arrivals.admit(msg, side.now)
        pair_run_until_idle(pair, random.Random(seed))
        end = pair.decode.ends["a"]
        seen.add(end.status if isinstance(end, ReqError) else end.finish.type)
        got = pair.decode.tokens.get("a", [])
        assert got == reference_output(range(60), 60)[: len(got)]
        pair_assert_all_returned(pair)
    assert {408, FinishType.TIMEOUT} <= seen


# --- a full queue ---


def test_a_full_queue_tells_when_half_of_it_should_have_had_its_turn():
    curve = Machine(read_ms=5.0, token_ms=0.25)
    sim = TimedSim(curve, max_running_requests=1, max_queued_requests=40, itl_budget_ms=0, disable_radix_cache=True)
    rng = np.random.default_rng(0)
    count = 0
    while "refused" not in sim.ends:
        if len(sim.scheduler.reqs) >= 41:
            send(sim, "refused", range(3))
        else:
            send(sim, f"r{count}", rng.integers(0, 97, 400), max_new_tokens=100)
            count += 1
        turn(sim, 12 if count < 20 else 1)  # some have had their turn before it is full
    refused = sim.ends["refused"]
    assert refused.status == 429
    waiting, began = len(sim.scheduler.planner.waiting), sim.now
    sim.run_until(lambda: len(sim.scheduler.planner.waiting) <= waiting // 2)
    assert refused.retry_after == pytest.approx(sim.now - began, rel=0.35)
    sim.scheduler.abort(AbortReq(""))
    sim.run_until_idle()


def test_a_batch_that_can_not_be_taken_in_is_to_be_split():
    sim = SimInstance(make_options(max_running_requests=1, max_queued_requests=2))
    for i in range(3):
        send(sim, f"b{i}", [i, 1], place=i)
    sim.plan()
    send(sim, "another", [4, 1])
    send(sim, "b3", [3, 1], place=3)
    sim.run_until_idle()
    another, fourth = sim.ends["another"], sim.ends["b3"]
    assert isinstance(another, ReqError)
    assert isinstance(fourth, ReqError)
    assert (another.status, "split" in another.message) == (429, False)
    assert (fourth.status, fourth.code, fourth.kind) == (413, "batch_too_large", "request_too_large")
    assert "split it" in fourth.message


# --- a step with little room ---


@pytest.mark.parametrize("chunk", [512, -1])
@pytest.mark.parametrize("length", [500, 512])
def test_no_request_begins_in_what_a_step_has_left_beside_others(length: int, chunk: int) -> None:
    """A scrap of less than a page once let the whole queue in, each without a token computed."""
    options = make_options(
        **{"page_size": 16, "max_total_tokens": 1 << 17, "max_running_requests": 256, "itl_budget_ms": 0},
        chunked_prefill_size=chunk,
        max_prefill_tokens=700,
    )
    sim = SimInstance(options, context_length=4096)
    rng = random.Random(1)
    same = [rng.randrange(97) for _ in range(length)]
    sim.submit("first", [rng.randrange(97) for _ in range(length)], max_new_tokens=1)
    for i in range(100):
        sim.submit(f"r{i}", same, max_new_tokens=1)
    for _ in range(3):
        turn(sim)
        begun = sim.scheduler.planner.running.values()
        assert sum(req.computed == 0 for req in begun) <= 1
    sim.run_until_idle()
    # What all begin with is computed once; then each lacks its last token.
    assert sim.scheduler.counters.prompt_tokens < 3 * length + 100 * options.page_size
    assert_all_returned(sim)


def test_a_new_key_is_not_behind_the_whole_queue_of_another() -> None:
    options = make_options(
        **{"page_size": 16, "max_total_tokens": 1 << 17, "max_running_requests": 256, "chunked_prefill_size": 512},
        itl_budget_ms=0,
        fair_scheduling=True,
    )
    sim = SimInstance(options, context_length=4096)
    rng = random.Random(1)
    for i in range(200):
        send(sim, f"a{i}", [rng.randrange(97) for _ in range(500)], max_new_tokens=1, key_name="a")
    turn(sim)
    send(sim, "b", [rng.randrange(97) for _ in range(500)], max_new_tokens=1, key_name="b")
    while "b" not in sim.tokens:
        turn(sim)
    assert sum(f"a{i}" in sim.tokens for i in range(200)) < 6


def test_many_refused_in_one_turn_add_the_queue_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = SimInstance(make_options(max_queued_requests=2, max_running_requests=2))
    added_up = 0
    waiting_seconds = PaceMeter.waiting_seconds

    def count(pace: PaceMeter) -> float:
        nonlocal added_up
        added_up += 1
        return waiting_seconds(pace)

    monkeypatch.setattr(PaceMeter, "waiting_seconds", count)
    for i in range(54):
        send(sim, f"r{i}", range(20))
    assert len(sim.scheduler.reqs) == 4
    assert added_up == 1
    sim.scheduler.now += 1
    send(sim, "later", range(20))
    assert added_up == 2


def test_idle_time_is_no_waiting_time_of_the_queue() -> None:
    """A burst after an idle hour is told to come back in a few seconds, not in two minutes."""
    sim = SimInstance(make_options(max_queued_requests=8, max_running_requests=1))
    send(sim, "before", range(8))
    sim.run_until_idle()
    sim.now += 3600
    for i in range(9):
        send(sim, f"r{i}", range(8))
    turn(sim)
    send(sim, "beyond", range(8))
    seconds = sim.scheduler.estimator.queue_seconds(4, sim.now)
    sim.plan()
    assert sim.ends["beyond"].status == 429
    assert sim.ends["beyond"].retry_after == 1
    assert seconds < 1


def test_the_rate_of_the_queue_is_measured_while_requests_wait() -> None:
    rate = QueueRate()
    rate.came(1, 10.0, waited=False)
    rate.came(0, 500.0, waited=True)  # the first one waits
    rate.came(0, 503.0, waited=True)
    assert rate.seconds(1) == 0
    rate.came(2, 504.0, waited=True)
    assert rate.seconds(1) == 2.0
    rate.came(1, 506.0, waited=True)
    assert rate.seconds(3) == 6.0
    rate.came(1, 507.0, waited=False)
    rate.came(3, 10_000.0, waited=True)  # five came at once, and three were admitted at once
    assert rate.seconds(1) == 2.0
    rate.came(1, 10_002.0, waited=True)
    assert rate.seconds(1) == 2.0
