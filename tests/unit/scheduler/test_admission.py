"""Memory that is reserved for output, and which request is retracted if it was too little.

Pure functions are compared with slow ones, and then all of it is tested together.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import numpy as np
import pytest
from support.sim import SimInstance, make_options, reference_output
from support.sim_tiers import TieredSim

from pdserve.scheduler.admission import Admission
from pdserve.scheduler.estimates.output_lengths import CLIP, MEMORY, OutputLengths
from pdserve.scheduler.estimates.page_forecast import Held, extra_slots, moments
from pdserve.scheduler.req import Req, Route, hold_of
from pdserve.scheduler.retraction import choose_victim
from pdserve.scheduler.tiers import KVTiers

ONE = np.array([1.0])


def learned(most: int, lengths) -> OutputLengths:
    known = OutputLengths()
    for length in lengths:
        known.learn(most, length)
    return known


# --- output lengths ---


def test_before_anything_is_known_every_length_is_as_likely():
    known = OutputLengths()
    halfway = known.survival([1023], [0], np.array([1.0, 512.0, 1022.0, 1023.0]))[0]
    assert halfway == pytest.approx([1, 0.5, 0, 0], abs=0.03)
    assert known.mean(1023) == pytest.approx(512, rel=0.05)
    # A request for the maximum of a long context rarely uses it.
    assert known.mean(100_000) == pytest.approx(CLIP / 2, rel=0.1)


def test_a_survival_curve_is_that_of_the_lengths():
    rng = np.random.default_rng(0)
    lengths = np.maximum(1, rng.exponential(100, 2000)).astype(int)
    known = learned(4000, lengths)
    ahead = np.array([20.0, 100.0, 300.0])
    got = known.survival([4000, 4000], [0, 150], ahead)
    # Of an exponential distribution, what is to come does not depend on what has been.
    assert got[0] == pytest.approx(np.exp(-ahead / 100), abs=0.06)
    assert got[1] == pytest.approx(np.exp(-ahead / 100), abs=0.12)
    assert known.mean(4000) == pytest.approx(lengths[-MEMORY:].mean(), rel=0.25)
    # Another class has not been heard of.
    assert known.survival([100], [0], np.array([50.0]))[0, 0] == pytest.approx(1 - 50 / 127, abs=0.02)


def test_no_request_outlives_its_maximum():
    known = learned(300, [5, 300, 300])
    assert known.survival([300], [299], ONE)[0, 0] == 0
    assert known.survival([300], [298], ONE)[0, 0] > 0


def test_what_still_runs_is_known_to_be_long():
    """Short outputs end first: to go by those that ended would take all others for short."""
    known = learned(1000, [8] * 20)
    alone = known.survival([1000], [6], np.array([40.0]))[0, 0]
    among = known.survival([1000] * 21, [6] + [400] * 20, np.array([40.0]))[0, 0]
    assert alone < 0.2
    assert among > 2 * alone


def test_what_is_known_fades():
    known = learned(500, [400] * 2000 + [10] * 3 * MEMORY)
    assert known.survival([500], [0], np.array([50.0]))[0, 0] < 0.1


# --- page forecast ---


def slow_use(held: list[Held], ends: list[int], page: int, most: int) -> int:
    """Return the most pages beyond those of now, step by step. ``ends``: after how many steps each request ends."""
    peak = 0
    for step in range(1, most + 1):
        extra = 0
        for one, end in zip(held, ends, strict=True):
            if step < end:
                extra += (math.ceil((one.length + step) / page) - math.ceil(one.length / page)) * page
            else:
                extra -= one.own
        peak = max(peak, extra)
    return peak


def test_use_of_known_ends_is_that_of_a_simulation_step_by_step():
    rng = random.Random(2)
    for _ in range(60):
        page, most = rng.choice([1, 4, 16]), 60
        held, ends = [], []
        for _ in range(rng.randrange(1, 8)):
            length = rng.randrange(1, 80)
            held.append(Held(length, rng.randrange(0, length + 1), most))
            ends.append(rng.randrange(1, most + 1))
        ahead = np.arange(1.0, most + 1)
        alive = np.array([[float(step < end) for step in ahead] for end in ends])
        assert extra_slots(held, alive, ahead, page, 2.0) == slow_use(held, ends, page, most)


def test_use_of_unknown_ends_keeps_its_promise_as_often_as_the_spread_says():
    """Against many draws of the ends: mean plus two deviations of each moment is exceeded by few of them."""
    rng = np.random.default_rng(5)
    held = [Held(int(n), int(n), 400) for n in rng.integers(20, 200, 40)]
    ahead = moments(400)
    alive = np.exp(-ahead / 80)[None, :].repeat(40, axis=0)
    kept = extra_slots(held, alive, ahead, 4, 2.0)
    ends = rng.exponential(80, (400, 40))
    peaks = []
    for draw in ends:
        use = [
            sum(
                (math.ceil((h.length + t) / 4) - math.ceil(h.length / 4)) * 4 if t < end else -h.own
                for h, end in zip(held, draw, strict=True)
            )
            for t in ahead
        ]
        peaks.append(max(0, *use))
    assert np.mean(np.array(peaks) > kept) < 0.08
    # And it is far from what would be kept if all might go on to the end.
    assert kept < sum(h.most for h in held) / 4


def test_moments_are_close_at_first_and_reach_the_end():
    assert moments(1).tolist() == [1]
    assert moments(10).tolist() == [1, 2, 3, 4, 6, 9, 10]
    assert len(moments(100_000)) < 40


# --- together ---


def test_nothing_is_kept_for_what_is_generated_elsewhere():
    """A prefill's requests end with their first token here, however much their clients ask for."""
    sim = SimInstance(make_options(max_total_tokens=64))
    for rid in ("a", "b"):
        sim.submit(rid, range(4), max_new_tokens=50)
    a, b = sim.scheduler.reqs["a"], sim.scheduler.reqs["b"]
    admission = Admission(sim.scheduler.memory, 1.0)
    assert admission.reserve([a], b) > 20
    a.route = b.route = Route.OUTGOING
    assert admission.reserve([a], b) == 0


def test_conservativeness_is_a_factor():
    sim = SimInstance(make_options(max_total_tokens=64))
    for rid in ("a", "b"):
        sim.submit(rid, range(4), max_new_tokens=50)
    a, b = sim.scheduler.reqs["a"], sim.scheduler.reqs["b"]
    kept = [Admission(sim.scheduler.memory, factor).reserve([a], b) for factor in (2.0, 4.0)]
    assert kept[1] == pytest.approx(2 * kept[0], abs=1)


def test_what_a_request_shares_does_not_come_free_with_it():
    """The one that runs is about to end; what it has alone is then the newcomer's, and what others use is not."""
    sim = SimInstance(make_options(max_total_tokens=64))
    sim.submit("a", range(31), max_new_tokens=30)
    sim.plan()
    sim.submit("b", range(50, 54), max_new_tokens=24)
    a, b = sim.scheduler.reqs["a"], sim.scheduler.reqs["b"]
    admission = Admission(sim.scheduler.memory, 1.0)
    for _ in range(200):
        admission.lengths.learn(30, 2)  # so long are the answers of those that ask for 30
        admission.lengths.learn(12, 12)
    b.max_new_tokens = 12
    kept = []
    for reused in (0, 28):
        a.reused = reused
        kept.append(admission.reserve([a], b))
    assert kept[0] < kept[1]


def test_what_was_learned_lets_more_requests_run_at_once():
    """All ask for 60 tokens; where all stop after 3, room for 3 is enough."""
    stops = {}
    for ends_early in (False, True):
        sim = SimInstance(make_options(max_total_tokens=128, disable_radix_cache=True))
        for i in range(40):
            prompt = [i, 2, 3, 4]
            stop = [reference_output(prompt, 3)[2]] if ends_early else []
            sim.submit(f"w{i}", prompt, max_new_tokens=60, stop_ids=stop)
            sim.run_until_idle()
        most = 0
        for i in range(8):
            sim.submit(f"r{i}", [50, i], max_new_tokens=60)
        for _ in range(4):
            sim.plan()
            most = max(most, len(sim.scheduler.planner.running))
            sim.work()
        stops[ends_early] = most
        sim.run_until_idle()
        for i in range(8):
            assert sim.tokens[f"r{i}"] == reference_output([50, i], 60)
    assert stops[True] > stops[False]


# --- who gives way ---


def running_reqs(sim: SimInstance) -> list[Req]:
    return [r for r in sim.scheduler.planner.running.values() if r.state == "running"]


def started(*prompts: tuple[str, list[int]], **options) -> SimInstance:
    sim = SimInstance(make_options(max_total_tokens=512, **options))
    for i, (rid, prompt) in enumerate(prompts):
        sim.submit(rid, prompt, max_new_tokens=30)
        sim.scheduler.reqs[rid].times.fcfs_time = float(i)
        for _ in range(6):
            sim.plan()
            sim.work()
    return sim


def test_the_victim_is_the_cheapest_a_page_and_never_the_oldest():
    shared = [7] * 40
    sim = started(("old", [1]), ("a", [*shared, 1]), ("b", [*shared, 2]), ("long", list(range(60))))
    reqs = {r.rid: r for r in running_reqs(sim)}
    memory, waiting = sim.scheduler.memory, sim.scheduler.planner.waiting
    assert (memory.headroom.private_len(reqs["a"]), hold_of(reqs["a"]).kv_len) == (
        hold_of(reqs["a"]).kv_len - 40,
        reqs["a"].total_len - 1,
    )

    def price(req: Req) -> float:
        private = memory.headroom.private_len(req)
        again = req.total_len - (hold_of(req).kv_len - private)
        return again / (memory.pool.pages_up(private) // memory.pool.page_size)

    chosen = choose_victim(list(reqs.values()), memory, waiting)
    assert chosen.rid != "old"
    assert price(chosen) == min(price(r) for r in reqs.values() if r.rid != "old")
    assert choose_victim(list(reversed(list(reqs.values()))), memory, waiting) is chosen
    assert choose_victim([reqs["old"]], memory, waiting) is reqs["old"]


def test_victims_are_those_of_the_slow_rule_that_counts_users_of_each_page():
    """Through a while of decoding, as pages fill up: shared ones cost nothing to compute again, and give nothing."""
    shared = [7] * 40
    sim = SimInstance(make_options(max_total_tokens=512, chunked_prefill_size=256))
    prompts = {"old": [1], "a": [*shared, 1], "b": [*shared, 2, 3], "alone": [4, 5], "long": range(60)}
    for i, (rid, prompt) in enumerate(prompts.items()):
        sim.submit(rid, prompt, max_new_tokens=40)
        sim.scheduler.reqs[rid].times.fcfs_time = float(i)
    for _ in range(8):
        sim.plan()
        sim.work()
    memory, page = sim.scheduler.memory, sim.options.page_size
    chosen = set()
    for _ in range(20):
        reqs = running_reqs(sim)
        pages = {req.rid: memory.pool.pages(hold_of(req), 0, hold_of(req).kv_len).tolist() for req in reqs}
        users = Counter(itertools.chain(*pages.values()))
        prices = {}
        for req in reqs:
            own = sum(users[number] == 1 for number in pages[req.rid])
            prices[req.rid] = (req.total_len - page * (len(pages[req.rid]) - own)) / own
        del prices["old"]
        victim = choose_victim(reqs, memory, sim.scheduler.planner.waiting).rid
        assert prices[victim] == pytest.approx(min(prices.values()))
        chosen.add(victim)
        sim.plan()
        sim.work()
    assert chosen & {"a", "b"}
    assert chosen & {"alone", "long"}


def test_what_the_host_keeps_makes_a_victim_cheap(monkeypatch):
    sim = started(("old", [1]), ("a", [2, 3, 4]), ("long", list(range(60))))
    reqs, memory = running_reqs(sim), sim.scheduler.memory
    for rid in ("a", "long"):
        monkeypatch.setattr(
            memory.headroom, "kept_len", lambda req, rid=rid: req.total_len - 1 if req.rid == rid else 0
        )
        assert choose_victim(reqs, memory, sim.scheduler.planner.waiting).rid == rid


def retracted_requests(policy: str) -> TieredSim:
    """Run six requests on a pool for three of them, some of which are retracted, and return the instance."""
    sim = TieredSim(
        200,
        store=False,
        max_total_tokens=64,
        schedule_conservativeness=0.01,
        hicache_write_policy=policy,
    )
    prompts = {f"r{i}": [i, 1, 2, 7, 5] for i in range(6)}
    for rid, prompt in prompts.items():
        sim.submit(rid, prompt, max_new_tokens=30)
    sim.settle()
    assert all(sim.tokens[rid] == reference_output(prompt, 30) for rid, prompt in prompts.items())
    assert sim.scheduler.planner.retraction.count > 0
    return sim


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_a_retracted_request_finds_its_kv_in_the_host_tier(policy):
    sim = retracted_requests(policy)
    assert sim.tiers.counts.loaded > 0
    # Nothing but the last page of each, and the token that is sampled from.
    assert sim.scheduler.counters.recomputed_tokens <= sim.scheduler.planner.retraction.count * (
        sim.options.page_size + 1
    )


def test_without_keeping_it_there_it_is_computed_again(monkeypatch):
    """The mistake that the test above is to find: a policy that keeps what is used twice keeps none of it."""
    monkeypatch.setattr(KVTiers, "keep", lambda self, req, pages: None)
    sim = retracted_requests("write_through_selective")
    page = sim.options.page_size
    assert sim.scheduler.counters.recomputed_tokens > sim.scheduler.planner.retraction.count * (page + 1)


def test_kv_of_a_peer_that_is_not_verified_is_not_kept():
    sim = TieredSim(200, store=False)
    sim.submit("a", range(20), max_new_tokens=9)
    sim.plan()
    sim.work()
    req, memory = sim.scheduler.reqs["a"], sim.scheduler.memory
    assert memory.headroom.kept_len(req) >= 16
    hold_of(req).verified = False
    assert memory.headroom.kept_len(req) == 0
    sim.settle()


# --- requests whose memory a hand-over keeps ---


@pytest.mark.parametrize("pinned", [0, 3, 7])
def test_who_is_being_moved_is_not_retracted_for_nothing(pinned: int) -> None:
    options = {"max_total_tokens": 256, "chunked_prefill_size": 64, "itl_budget_ms": 0}
    sim = SimInstance(make_options(**options, schedule_conservativeness=0.0, disable_overlap_schedule=True))
    rng = random.Random(1)
    for i in range(8):
        sim.submit(f"r{i}", [rng.randrange(97) for _ in range(16)], max_new_tokens=60)
    for _ in range(3):
        sim.plan()
        sim.work()
    scheduler = sim.scheduler
    moving = [f"r{i}" for i in range(1, 1 + pinned)]
    holds = [scheduler.memory.pinned.pin(scheduler.reqs[rid]) for rid in moving]
    for _ in range(40):
        sim.plan()
        sim.work()
    assert not any(scheduler.reqs[rid].retractions for rid in moving if rid in scheduler.reqs)
    assert scheduler.planner.retraction.count > 0 or pinned == 7
    for hold in holds:
        scheduler.memory.pinned.unpin(hold)
    sim.run_until_idle()
    assert scheduler.planner.retraction.count
    assert all(len(sim.tokens[f"r{i}"]) == 60 for i in range(8))
