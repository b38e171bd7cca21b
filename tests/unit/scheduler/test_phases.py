"""Where a request's time goes: phases add up to its age and name the instance that spent them, whatever happens.

The simulated worlds (``support/world/node.py``) hold every request that ends there to ``phases_problem``. Here are the
account itself, single scenes with exact figures, and a look at whether the worlds meet every kind of request.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.phases import phases_problem, where
from support.sim import SimInstance, make_options, reference_output
from support.world.campaign import EQUALS, OPTIONS, PAIR, Campaign
from support.world.node import Node
from support.world.timed import Chance
from support.world.world import World

from pdserve.messages.outputs import FinishType, Phase, PhaseTime, ReqTokens, Timing
from pdserve.messages.requests import AbortReq
from pdserve.scheduler.phases import PhaseClock
from pdserve.server.http.generation.timing import timing

DURATION = st.floats(-5, 1e4)


class SlowInstance(SimInstance):
    """An instance with steps of 4 ms, and with requests that come at ``now``."""

    def work(self) -> bool:
        self.now += 0.004
        return super().work()

    def checked(self, rid: str, *, computed: bool = True) -> Timing:
        """Check the phases of a request that has just ended. It came at 0, as ``make_generate`` says."""
        end = self.ends[rid]
        assert isinstance(end, ReqTokens)
        assert end.meta is not None
        age = sum(one.ms for one in end.meta.timing.phases) / 1000
        assert age <= self.now
        assert phases_problem(end.meta, age, computed=computed) is None
        return end.meta.timing


# --- the account ---


@given(
    st.lists(st.tuples(st.sampled_from(Phase), st.floats(-1, 10)), max_size=8),
    st.tuples(DURATION, DURATION, DURATION),
    st.floats(-5, 5),
)
def test_an_account_adds_up_whatever_a_clock_or_a_peer_says(steps, there, late) -> None:
    began, now = 100.0, 100.0 + late
    clock = PhaseClock(began, now, "decode")
    highest = max(began, now)
    for phase, seconds in steps:
        now += seconds
        highest = max(highest, now)
        clock.enter(phase, now)
    clock.credit(*there, now)
    assert all(one.ms >= 0 for one in clock.times())
    assert sum(one.ms for one in clock.times()) == pytest.approx((highest - began) * 1000, abs=1e-3)


def test_a_prompt_that_was_computed_before_the_decode_asked_is_no_queue() -> None:
    """The decode connects for 30 ms, and the prefill computes for 20 of them: that was told as 0 ms of prefill."""
    clock = PhaseClock(0.0, 0.001, "decode")
    clock.enter(Phase.TRANSFER, 0.031)
    clock.credit(queue_ms=0.0, prefill_ms=20.0, ahead_ms=20.0, now=0.033)
    spent = {(one.phase.value, one.at): round(one.ms, 6) for one in clock.times()}
    assert spent == {
        ("tokenize", "decode"): 1,
        ("queue", "decode"): 10,
        ("prefill", "prefill"): 20,
        ("transfer", "decode"): 2,
    }


def test_a_prompt_that_waits_and_is_computed_after_the_decode_asked_is_the_prefills() -> None:
    clock = PhaseClock(0.0, 0.0, "decode")
    clock.enter(Phase.TRANSFER, 0.005)
    clock.credit(queue_ms=3.0, prefill_ms=20.0, ahead_ms=0.0, now=0.030)
    clock.enter(Phase.DECODE, 0.034)  # the KV has landed
    spent = {(one.phase.value, one.at): round(one.ms, 6) for one in clock.times()}
    assert spent == {
        ("queue", "decode"): 5,
        ("queue", "prefill"): 3,
        ("prefill", "prefill"): 20,
        ("transfer", "decode"): 6,
    }


def test_a_prefill_that_began_before_the_decode_had_the_request_is_charged_what_there_was() -> None:
    clock = PhaseClock(0.0, 0.0, "decode")
    clock.enter(Phase.TRANSFER, 0.002)
    clock.credit(queue_ms=0.0, prefill_ms=50.0, ahead_ms=50.0, now=0.005)
    assert (clock.spent(Phase.PREFILL), clock.spent(Phase.QUEUE)) == (5.0, 0.0)


@pytest.mark.parametrize("began", [99.9, 100.0])
def test_a_moved_account_goes_on_where_it_stopped(began: float) -> None:
    """What it takes to come here is TRANSFER; if this host's clock says less than the account, the account is right."""
    clock = PhaseClock(began, 100.0, "decode")
    there = [PhaseTime(Phase.QUEUE, "prefill", 50.0), PhaseTime(Phase.DECODE, "decode", 30.0)]
    came = clock.take_over(there, began, 100.05)
    clock.enter(Phase.DECODE, 100.06)
    assert came == (99.9 if began == 99.9 else pytest.approx(99.97))
    assert sum(one.ms for one in clock.times()) == pytest.approx((100.06 - came) * 1000)
    assert clock.spent(Phase.TRANSFER) == pytest.approx((100.06 - came) * 1000 - 80)


# --- one instance ---


def test_a_prompt_in_chunks_and_its_output_on_one_server() -> None:
    sim = SlowInstance(make_options(chunked_prefill_size=16))
    sim.submit("a", range(40), max_new_tokens=4)
    sim.run_until_idle()
    account = sim.checked("a")
    assert where(account) == {(name, "unified") for name in ("tokenize", "queue", "prefill", "decode")}
    assert account.prefill_ms >= 3 * 4
    assert account.first_token_ms == pytest.approx(account.tokenize_ms + account.queue_ms + account.prefill_ms)


def test_a_cached_prompt_and_another_answer_to_it_still_compute_something() -> None:
    sim = SlowInstance()
    sim.submit("a", range(30), max_new_tokens=2)
    sim.run_until_idle()
    sim.submit("b", range(30), max_new_tokens=2)
    sim.submit("c", range(30), max_new_tokens=2, fork_of="b")
    sim.run_until_idle()
    for rid in "bc":
        assert sim.checked(rid).prefill_ms > 0
        assert sim.ends[rid].meta.cached_tokens > 0
    assert sim.ends["c"].meta.timing.queue_ms > sim.ends["b"].meta.timing.queue_ms  # it waits for b's prompt


def test_what_a_retraction_costs_is_queue_and_prefill() -> None:
    sim = SlowInstance(make_options(max_total_tokens=64, page_size=4))
    for rid in "abc":
        sim.submit(rid, [ord(rid)] * 12, max_new_tokens=24)
    sim.run_until_idle()
    assert sum(sim.ends[rid].meta.retractions for rid in "abc") > 0
    for rid in "abc":
        account = sim.checked(rid)
        after_first = sum(one.ms for one in account.phases) - account.first_token_ms
        if sim.ends[rid].meta.retractions:
            assert account.decode_ms < after_first - 4
        else:
            assert account.decode_ms == pytest.approx(after_first)


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_step_under_way_when_its_request_is_retracted_is_no_queue(tokens: int) -> None:
    sim = SlowInstance()
    sim.submit("a", range(8), max_new_tokens=tokens)
    sim.plan()
    sim.scheduler.planner.retraction.retract(sim.scheduler.reqs["a"], sim.now)
    sim.run_until_idle()
    account = sim.checked("a")
    # It waited for its two plans only, 1 ms each.
    assert account.queue_ms == pytest.approx(2 if tokens > 1 else 1)
    assert account.prefill_ms >= 4


def test_a_request_that_is_aborted_while_it_waits_was_queued() -> None:
    sim = SlowInstance(make_options(max_running_requests=1))
    sim.submit("a", range(8), max_new_tokens=20)
    sim.submit("b", range(8), max_new_tokens=20)
    for _ in range(8):
        sim.plan()
        sim.work()
    sim.scheduler.abort(AbortReq("b"))
    sim.plan()
    assert sim.ends["b"].finish.type is FinishType.ABORT
    assert where(sim.checked("b", computed=False)) == {("tokenize", "unified"), ("queue", "unified")}
    sim.run_until_idle()


# --- a pair ---


def test_a_short_prompt_that_a_prefill_computes_ahead_took_time_there() -> None:
    """What ``make demo`` shows: both legs come at once, and the prompt is done before the decode is connected."""
    world = World()
    chance = Chance(world, random.Random(0))
    options = {mode: make_options(**OPTIONS, disaggregation_mode=mode) for mode in ("prefill", "decode")}
    prefill = Node(world, "p", 9001, options["prefill"])
    decode = Node(world, "d", 9002, options["decode"])
    world.answers["a"] = reference_output(range(9), 5)
    for node in (prefill, decode):
        node.submit("a", list(range(9)), 7, 9001, max_new_tokens=5)
    for _ in range(400):
        chance.run(world.now + 0.01)
        prefill.turn()
        decode.turn()
    answer, leg = world.ends["d", "a"].meta.timing, world.ends["p", "a"].meta.timing
    assert {("prefill", "prefill"), ("decode", "decode"), ("transfer", "decode")} <= where(answer)
    assert ("prefill", "decode") not in where(answer)
    # The prefill began before it was asked: of what it computed the decode has all, but for what came before its time.
    assert 0 < answer.prefill_ms <= leg.prefill_ms + 1e-6
    assert {("queue", "decode"), ("prefill", "prefill"), ("transfer", "prefill")} <= where(leg)


@pytest.mark.parametrize(("modes", "seed"), [(PAIR, 14), (EQUALS, 17)])
def test_the_worlds_hold_every_kind_of_request_to_its_account(modes: tuple[str, ...], seed: int) -> None:
    """Each end was checked as it was heard; here, that there was every kind of end to check."""
    options = {"disaggregation_threshold": "auto", "max_total_tokens": 104}  # which a few requests overrun
    options["schedule_policy"] = "fcfs"
    campaign = Campaign(seed, modes, faults=4, moves=25, outputs=(1, 3, 12, 40), **options)
    campaign.run(80, rate=400)
    kinds: Counter[str] = Counter()
    for end in campaign.world.ends.values():
        meta = getattr(end, "meta", None)
        if meta is None:
            continue
        kinds[meta.route] += 1
        kinds["retracted"] += meta.retractions > 0
        prefills = {one.at for one in meta.timing.phases if one.phase is Phase.PREFILL}
        kinds["computed on both"] += len(prefills) > 1
        kinds["computed by the decode alone"] += meta.route == "local" and prefills == {"decode"}
    missing = {"outgoing", "incoming", "local", "retracted", "computed on both", "computed by the decode alone"}
    assert not (missing - set(+kinds)), kinds
    assert campaign.moves["moved"] > 0


# --- as clients are told ---


def test_clients_see_the_phases_add_up_to_the_total_and_who_spent_them() -> None:
    phases = [
        PhaseTime(Phase.TOKENIZE, "decode", 1.0),
        PhaseTime(Phase.QUEUE, "decode", 2.0),
        PhaseTime(Phase.PREFILL, "prefill", 20.0),
        PhaseTime(Phase.DECODE, "decode", 70.0),
    ]
    account = timing(Timing(1.0, 2.0, 20.0, decode_ms=70.0, here="decode", phases=phases), 0.0955)
    assert account["total_ms"] == 95.5
    assert account["reply_ms"] == 2.5
    assert [(one["phase"], one["at"], one["process"], one["ms"]) for one in account["phases"]] == [
        ("tokenize", "decode", "tokenizer", 1.0),
        ("queue", "decode", "scheduler", 2.0),
        ("prefill", "prefill", "worker", 20.0),
        ("decode", "decode", "worker", 70.0),
        ("reply", "decode", "detokenizer", 2.5),
    ]
    # Nothing is negative where the account came from another host and is longer than this one's clock says.
    assert timing(Timing(here="decode", phases=phases), 0.09)["total_ms"] == 93.0
