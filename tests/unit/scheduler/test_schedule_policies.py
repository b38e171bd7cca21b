"""Orders of the queue, each against a slow and obvious one, on a tree that changes as requests come and run."""

from __future__ import annotations

import gc
import itertools
import random
import re
import statistics
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
from support.counted_calls import counted_calls
from support.product_files import ROOT
from support.sim import SimInstance, make_generate, make_options, reference_output
from support.sim_machine import Machine, TimedSim

from pdserve.messages.requests import AbortReq
from pdserve.scheduler.kv_memory import KVMemory
from pdserve.scheduler.memory_terms import NO_RESERVE, PoolSizes
from pdserve.scheduler.options import SchedulerOptions
from pdserve.scheduler.policies.base import PolicyNeeds
from pdserve.scheduler.policies.by_prefix import HeaviestPrefixFirst, LongestPrefixMatch
from pdserve.scheduler.policies.by_remaining import PATIENCE, ShortestRemainingFirst
from pdserve.scheduler.policies.make import make_policy
from pdserve.scheduler.policies.sort_key import Random
from pdserve.scheduler.policy_registry import POLICIES
from pdserve.scheduler.req import Req, ReqState, Route

PAGE = 4
MOST_CALLS = 5_000
"""Limit of the function calls of one step of the order of ten thousand requests.

It allows a few for each page that comes or goes, not some for each request that waits.
"""


def make_req(rid: str, prompt, *, arrival: float = 0.0, extra_key: str = "", max_new_tokens: int = 4) -> Req:
    msg = make_generate(rid, prompt, max_new_tokens=max_new_tokens)
    msg.arrival, msg.extra_key = arrival, extra_key
    return Req.create(msg, Route.LOCAL, ReqState.WAITING, max_new_tokens, 1)


def make_memory(tokens: int = 96, rows: int = 64) -> KVMemory:
    options = make_options(page_size=PAGE, max_total_tokens=tokens, max_running_requests=rows)
    return KVMemory(options, PoolSizes(tokens), 512)


def run_through(memory: KVMemory, req: Req) -> None:
    """Compute a request and leave its prefix in the tree."""
    assert memory.admit(req, NO_RESERVE, prefix_limit=req.longest_reusable_prefix)
    req.computed = req.known_len
    memory.share(req, req.computed)
    memory.finish(req)


def brute_lpm(reqs, memory: KVMemory) -> list[Req]:
    return sorted(reqs, key=lambda r: (-min(memory.prefix_len(r), r.prompt_len), r.times.fcfs_time))


def brute_srpf(reqs, memory: KVMemory, policy: ShortestRemainingFirst) -> list[Req]:
    return sorted(reqs, key=lambda r: policy.due(r, r.known_len, memory.prefix_len(r)))


def brute_dfs(reqs, memory: KVMemory) -> list[Req]:
    """Order requests as SGLang does: a tree of their cached prefixes, in which the children with most requests come
    first.

    Requests that end at a node come after its children.
    """
    cached = {r: bytes([len(r.msg.extra_key)]) + r.msg.input_ids[: 4 * memory.prefix_len(r)] for r in reqs}
    page = 4 * PAGE

    def visit(members: list[Req], depth: int) -> list[Req]:
        ends = [r for r in members if len(cached[r]) <= depth]
        children: dict[bytes, list[Req]] = {}
        for r in members:
            if len(cached[r]) > depth:
                children.setdefault(cached[r][: depth + page], []).append(r)
        order = sorted(children.values(), key=lambda c: (-len(c), min(r.times.fcfs_time for r in c)))
        ends.sort(key=lambda r: r.times.fcfs_time)
        return [r for child in order for r in visit(child, depth + page)] + ends

    return visit(list(reqs), 1)


def test_orders_by_prefix_are_true_whatever_the_tree_does():
    rng = random.Random(3)
    for trial in range(6):
        memory = make_memory()
        lpm, dfs = LongestPrefixMatch(memory), HeaviestPrefixFirst(memory)
        srpf = ShortestRemainingFirst(memory, SimInstance().scheduler.estimator.model)
        policies = (lpm, dfs, srpf)
        waiting: list[Req] = []
        stems = [[rng.randrange(50) for _ in range(24)] for _ in range(4)]
        for n in range(160):
            stem = rng.choice(stems)
            prompt = stem[: rng.randrange(1, 24)] + [rng.randrange(3) for _ in range(rng.randrange(1, 10))]
            req = make_req(f"r{n}", prompt, arrival=float(n), extra_key=rng.choice(["", "", "k"]))
            if rng.random() < 0.6:
                waiting.append(req)
                for policy in policies:
                    policy.add(req, 0)
            else:
                run_through(memory, req)  # what is stored, and, as the pool is small, what is evicted for it
            if waiting and rng.random() < 0.3:
                gone = waiting.pop(rng.randrange(len(waiting)))
                for policy in policies:
                    policy.remove(gone)
            if rng.random() < 0.03:
                memory.flush()
            if n % 4 == trial % 4:
                assert list(lpm.order(0)) == brute_lpm(waiting, memory)
                assert list(dfs.order(0)) == brute_dfs(waiting, memory)
                assert list(srpf.order(0)) == brute_srpf(waiting, memory, srpf)
        assert memory.pool.losses > 5
        assert any(memory.prefix_len(r) for r in waiting)


def test_lanes_are_orders_of_their_own():
    memory = make_memory()
    for policy in (LongestPrefixMatch(memory), HeaviestPrefixFirst(memory)):
        reqs = [make_req(f"r{i}", [1, 2, 3, 4, *([5] * i), 9], arrival=float(i)) for i in range(8)]
        for i, req in enumerate(reqs):
            policy.add(req, i % 2)
        assert list(policy.order(1)) == reqs[1::2]
        assert list(policy.order(7)) == []


@pytest.mark.parametrize("policy", [LongestPrefixMatch, HeaviestPrefixFirst])
def test_the_order_of_a_lane_looks_at_no_other(policy: type[LongestPrefixMatch | HeaviestPrefixFirst], monkeypatch):
    """With a lane for each user, an order of each would otherwise cost users times requests."""
    by_prefix = policy(make_memory())
    reqs = [make_req(f"r{i}", [1, 2, 3, 4, *([5] * i), 9], arrival=float(i)) for i in range(9)]
    for i, req in enumerate(reqs):
        by_prefix.add(req, i % 3)
    monkeypatch.setattr(by_prefix.index, "order", None)
    for lane in range(3):
        assert list(by_prefix.order(lane)) == reqs[lane::3]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lpm", "dfs-weight", "srpf"])
def test_ten_thousand_wait_and_the_order_is_true_and_quick(name: str):
    """Each step: the first few get memory, of which others lose theirs, and what they compute is stored."""
    rng = np.random.default_rng(0)
    options = make_options(page_size=16, max_total_tokens=1 << 16, max_running_requests=64, schedule_policy=name)
    memory = KVMemory(options, PoolSizes(1 << 16), 4096)
    policy = make_policy(PolicyNeeds(options, memory, SimInstance().scheduler.estimator.model))
    system = rng.integers(0, 97, 512)
    groups = [np.concatenate([system, rng.integers(0, 97, 256)]) for _ in range(500)]
    reqs = []
    for n in range(10_000):
        prompt = np.concatenate([groups[rng.integers(500)], rng.integers(0, 97, rng.integers(16, 512))])
        reqs.append(make_req(f"r{n}", prompt, arrival=n / 100))
        policy.add(reqs[-1], 0)
    waiting, took = dict.fromkeys(reqs), []
    brute = {"lpm": brute_lpm, "dfs-weight": None, "srpf": lambda r, m: brute_srpf(r, m, policy)}[name]
    for step in range(150):
        with counted_calls() as calls:
            first = list(itertools.islice(policy.order(0), 4))
            for req in first:
                policy.remove(req)
                del waiting[req]
                run_through(memory, req)
        took.append(sum(calls))
        if brute is not None and step % 30 == 29:
            assert list(itertools.islice(policy.order(0), 40)) == brute(waiting, memory)[:40]
    assert memory.pool.losses > 50
    assert statistics.median(took) < MOST_CALLS, statistics.median(took)


def test_a_policy_of_each_name_serves_everything():
    for name in ("fcfs", "srpf", "lpm", "dfs-weight", "lof", "random", "priority"):
        sim = SimInstance(make_options(schedule_policy=name, max_running_requests=2))
        prompts = {f"r{i}": [*range(i % 3), 7, 8, 9, 1, i] for i in range(12)}
        for rid, prompt in prompts.items():
            sim.submit(rid, prompt, max_new_tokens=3)
        sim.run_until_idle()
        for rid, prompt in prompts.items():
            assert sim.tokens[rid] == reference_output(prompt, 3)


def test_longest_output_first_and_a_random_order_that_a_seed_repeats():
    def ends(**options) -> list[str]:
        sim = SimInstance(make_options(max_running_requests=1, **options))
        for i in range(8):
            sim.submit(f"r{i}", [i, 2, 3], max_new_tokens=1 + (i * 5) % 8)
        sim.run_until_idle()
        return list(sim.ends)

    assert ends(schedule_policy="lof") == ["r3", "r6", "r1", "r4", "r7", "r2", "r5", "r0"]
    assert ends(schedule_policy="random", random_seed=1) == ends(schedule_policy="random", random_seed=1)
    assert ends(schedule_policy="random", random_seed=1) != ends(schedule_policy="random", random_seed=2)


def test_a_request_that_waits_again_keeps_its_place_in_a_random_order() -> None:
    """It was parked, or its grant was revoked. A new draw each time would give it more chances than others have."""
    policy = Random(1)
    reqs = [make_req(f"r{i}", [i], arrival=float(i)) for i in range(20)]
    for req in reqs:
        policy.add(req, 0)
    order = list(policy.order(0))
    assert order != reqs
    for req in reqs:
        policy.remove(req)
        policy.add(req, 0)
        assert list(policy.order(0)) == order


def test_nothing_is_kept_of_requests_that_are_gone() -> None:
    policy = Random(1)
    for i in range(20):
        req = make_req(f"r{i}", [i])
        policy.add(req, 0)
        policy.remove(req)
    del req
    gc.collect()
    assert not policy._drawn


def starves(policy: str) -> bool:
    """Return whether a request is not served while hundreds come that its policy lets go before it."""
    options = make_options(schedule_policy=policy, max_running_requests=3, max_total_tokens=256)
    sim, numbers, draws = SimInstance(options), itertools.count(), [0.1]
    order = sim.scheduler.planner.waiting.policy
    if isinstance(order, Random):
        order._rng = SimpleNamespace(random=lambda: draws[-1])

    def send(rid: str, prompt: list[int], outputs: int) -> None:
        message = make_generate(rid, prompt, max_new_tokens=outputs)
        message.arrival = sim.now
        sim.scheduler.arrivals.admit(message, sim.now)

    for step in range(400):
        while len(sim.scheduler.reqs) < 7:
            send(f"r{next(numbers)}", [*((3 * i) % 97 for i in range(40)), step % 97, 1, 2, 3], 6)
        if step == 5:
            draws.append(0.9)
            send("last", [(5 * i + 1) % 97 for i in range(40)], 2)
            draws.pop()
        sim.plan()
        sim.work()
    assert next(numbers) > 100
    return "last" not in sim.ends


def test_the_policies_that_let_requests_wait_without_limit_are_named() -> None:
    starving = {name for name in POLICIES if starves(name)}
    page = (ROOT / "docs" / "scheduling.md").read_text()
    (said,) = re.findall(r"With (.*?), a request\s+may wait without limit", page)
    assert set(re.findall("`(.*?)`", said)) == starving
    (text,) = [f.metadata["help"] for f in fields(SchedulerOptions) if f.name == "schedule_policy"]
    (said,) = re.findall("With ([^.]*?) a request may wait without limit", text)
    assert set(re.split(", | and ", said)) == starving


# --- shortest remaining prefill ---

CURVE = Machine(read_ms=5.0, token_ms=0.25)


def timed(policy: str, **options) -> TimedSim:
    return TimedSim(CURVE, schedule_policy=policy, itl_budget_ms=0, chunked_prefill_size=256, **options)


def test_a_short_prompt_goes_between_the_pieces_of_a_long_one():
    first = {}
    for policy in ("fcfs", "srpf"):
        sim = timed(policy)
        sim.submit("long", np.arange(3000) % 97, max_new_tokens=2)
        sim.plan()
        sim.work()
        sim.submit("short", range(40), max_new_tokens=2)
        sim.scheduler.reqs["short"].times.fcfs_time = sim.now
        began = sim.now
        sim.run_until_idle()
        assert sim.tokens["short"] == reference_output(range(40), 2)
        assert sim.tokens["long"] == reference_output(np.arange(3000) % 97, 2)
        first[policy] = sim.first_token_at["short"] - began
    assert first["srpf"] < 0.25  # the piece under way, the one planned behind it, and its own
    assert first["fcfs"] > 0.6


def test_no_prompt_waits_for_what_comes_later_than_its_patience():
    """Short prompts come faster than they can be computed: a long one is overtaken by those of its patience alone."""
    sim = timed("srpf", max_running_requests=4, disable_radix_cache=True)
    rng = np.random.default_rng(1)
    sim.submit("long", rng.integers(0, 97, 2000), max_new_tokens=1)
    long = sim.scheduler.reqs["long"]
    long.times.fcfs_time = came = sim.now
    arrived: dict[str, float] = {}

    def more() -> bool:
        due = int((sim.now - came) / 0.04)
        while len(arrived) < due:  # 50 ms of work each 40 ms
            rid = f"s{len(arrived)}"
            sim.submit(rid, rng.integers(0, 97, 200), max_new_tokens=1)
            sim.scheduler.reqs[rid].times.fcfs_time = arrived[rid] = came + (len(arrived) + 1) * 0.04
        return "long" in sim.tokens

    sim.run_until(more)
    own = 2000 * CURVE.token_ms / 1000
    before = [at - came for rid, at in arrived.items() if sim.first_token_at.get(rid, 1e9) < sim.first_token_at["long"]]
    assert len(before) > 20  # it was overtaken
    assert max(before) < PATIENCE * own * 1.3
    # And everyone else was served meanwhile, in a time that the bound tells: theirs, and the long one's.
    assert sim.first_token_at["long"] - came < (1 + 50 / 40) * PATIENCE * own * 1.5
    sim.scheduler.abort(AbortReq(""))
    sim.run_until_idle()
