"""Policies compared on the same loads in virtual time."""

from __future__ import annotations

from statistics import fmean

import pytest
from support.routing_sim import (
    Job,
    Message,
    Outcome,
    RoutingSim,
    conversations,
    hit_rate,
    percentile,
    plain_load,
    tokens_of,
)

from pdserve.router.options import RouterOptions
from pdserve.router.policies.registry import POLICIES

INSTANCES = 8
CACHED_SHARE = 0.4
"""Part of all that would be cached that fits into all caches together."""


def outcomes(policy: str, jobs: list[Job], **options: float) -> list[Outcome]:
    sim = RoutingSim(policy, int(tokens_of(jobs) * CACHED_SHARE / INSTANCES), **options)
    served = sim.run(jobs)
    assert len(served) == len(jobs)
    for instance in sim.fleet.instances:
        assert (instance.answers, instance.prompt_tokens, instance.running) == (0, 0, 0)
    return served


@pytest.mark.parametrize("seed", [1, 2])
def test_policies_keep_their_promises(seed):
    jobs = conversations(seed, 250, rate=7.0)
    served = {policy: outcomes(policy, jobs) for policy in POLICIES}
    hits = {policy: hit_rate(ones) for policy, ones in served.items()}
    slowest = {policy: percentile(ones, 0.99) for policy, ones in served.items()}
    assert min(hits["cache_aware"], hits["session"]) > 1.5 * hits["round_robin"]
    assert slowest["least_load"] <= slowest["round_robin"] <= slowest["random"]
    assert slowest["power_of_two"] <= slowest["random"]
    assert slowest["cache_aware"] <= slowest["least_load"]


@pytest.mark.parametrize("reports", [False, True])
@pytest.mark.parametrize(
    ("pairs", "workers", "rate"), [(1, 0, 4.0), (2, 0, 8.0), (4, 0, 16.0), (0, 2, 8.0), (0, 8, 30.0), (2, 2, 14.0)]
)
def test_the_default_is_nowhere_slower_than_taking_turns(pairs, workers, rate, reports):
    jobs = plain_load(1, 500, rate)
    default, in_turn = (
        RoutingSim(policy, 20_000, pairs=pairs, workers=workers, reports=reports).run(jobs)
        for policy in (RouterOptions().policy, "round_robin")
    )
    gain = 1.0 if (pairs, workers) == (1, 0) else 0.9
    assert fmean(one.seconds for one in default) <= gain * fmean(one.seconds for one in in_turn)
    assert percentile(default, 0.99) <= 1.001 * percentile(in_turn, 0.99)
    assert fmean(one.token_ms for one in default) <= 1.01 * fmean(one.token_ms for one in in_turn)


def test_old_reports_do_not_mislead_the_least_load():
    jobs = conversations(3, 250, rate=7.0)
    with_reports = percentile(outcomes("least_load", jobs, reports=True), 0.99)
    assert with_reports <= percentile(outcomes("round_robin", jobs), 0.99)


def test_pairs_share_the_load_as_workers_do():
    jobs = conversations(4, 250, rate=5.0)
    in_turn, least, cached = (
        outcomes(policy, jobs, workers=0, pairs=INSTANCES) for policy in ("round_robin", "least_load", "cache_aware")
    )
    assert percentile(least, 0.99) <= percentile(in_turn, 0.99)
    assert hit_rate(cached) > 1.5 * hit_rate(in_turn)


def test_without_shared_prefixes_the_cache_costs_nothing():
    jobs = [
        job._replace(messages=(Message(10**9 + number, 500), *job.messages[1:]))
        for number, job in enumerate(conversations(5, 600, rate=7.0, turns=1))
    ]
    assert percentile(outcomes("cache_aware", jobs), 0.99) == percentile(outcomes("least_load", jobs), 0.99)


def test_a_prefix_that_all_share_loads_all_instances():
    shared = Message(1, 4000)
    jobs = [Job(number * 0.05, (shared, Message(number + 2, 400)), 50) for number in range(600)]
    sim = RoutingSim("cache_aware", 100_000)
    served = sim.run(jobs)
    counts = [sim.sent_to.count(instance) for instance in sim.fleet.instances]
    assert max(counts) <= 1.5 * len(jobs) / INSTANCES
    assert hit_rate(served) > 0.85
