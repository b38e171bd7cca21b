"""Requests that wait in true order of longest cached prefix, and what asking the tree for each would cost."""

from __future__ import annotations

import itertools
import time
from typing import NamedTuple

import numpy as np

from ...messages.base import pack_i32
from ...messages.requests import GenerateReq
from ...messages.sampling import SamplingParams
from ...scheduler.kv_memory import KVMemory
from ...scheduler.memory_terms import NO_RESERVE, PoolSizes
from ...scheduler.options import SchedulerOptions
from ...scheduler.policies.by_prefix import LongestPrefixMatch
from ...scheduler.req import Req, ReqState, Route
from ..errors import BenchError
from .options import CacheBenchOptions

STEPS, ADMITTED, BRUTE_EVERY = 200, 4, 20
GROUPS, SYSTEM_TOKENS, GROUP_TOKENS, MOST_OWN_TOKENS = 500, 512, 256, 512
POOL_TOKENS = 1 << 16
"""Far less than the prompts: nearly every step evicts."""


class QueueTimes(NamedTuple):
    """Times of a queue in µs. ``losses`` counts the evictions of prefixes meanwhile."""

    step: list[float]
    """Times of the steps: the first few requests are found, get memory, and their results are stored."""
    whole: list[float]
    """Times of ordering all requests."""
    brute: list[float]
    """Times of brute force: a lookup of each request, and a sort."""
    losses: int


def _waiting(count: int) -> list[Req]:
    rng = np.random.default_rng(0)
    system = rng.integers(0, 30_000, SYSTEM_TOKENS, dtype=np.int32)
    groups = [
        np.concatenate([system, rng.integers(0, 30_000, GROUP_TOKENS, dtype=np.int32)])
        for _ in range(max(1, min(GROUPS, count // 20)))
    ]
    sampling = SamplingParams(seed=0, max_new_tokens=1, temperature=0.0)
    reqs = []
    for n in range(count):
        own = rng.integers(0, 30_000, rng.integers(16, MOST_OWN_TOKENS), dtype=np.int32)
        prompt = np.concatenate([groups[rng.integers(len(groups))], own])
        msg = GenerateReq(rid=f"r{n}", input_ids=pack_i32(prompt), sampling=sampling, stop_ids=(1,), arrival=n / 100)
        reqs.append(Req.create(msg, Route.LOCAL, ReqState.WAITING, 1, 1))
    return reqs


def measure_queue(options: CacheBenchOptions) -> QueueTimes:
    """Measure how long it takes to order waiting requests by their longest cached prefix, and to run the first ones.

    Raises ``BenchError`` if the order differs from that of brute force.
    """
    page = options.page_size
    reqs = _waiting(options.queued)
    tokens = POOL_TOKENS // page * page
    server = SchedulerOptions(page_size=page, max_total_tokens=tokens, max_running_requests=ADMITTED)
    memory = KVMemory(server, PoolSizes(tokens), 4096)
    policy = LongestPrefixMatch(memory)
    for req in reqs:
        policy.add(req, 0)
    waiting = dict.fromkeys(reqs)
    times = QueueTimes([], [], [], 0)
    for step in range(min(STEPS, max(1, options.queued // ADMITTED // 2))):
        if step % BRUTE_EVERY == 0:
            _compare(policy, memory, list(waiting), times)
        began = time.perf_counter()
        for req in list(itertools.islice(policy.order(0), ADMITTED)):
            policy.remove(req)
            del waiting[req]
            _run_through(memory, req)
        times.step.append((time.perf_counter() - began) * 1e6)
    return times._replace(losses=memory.pool.losses)


def _compare(policy: LongestPrefixMatch, memory: KVMemory, waiting: list[Req], times: QueueTimes) -> None:
    began = time.perf_counter()
    brute = sorted(waiting, key=lambda r: (-min(memory.prefix_len(r), r.prompt_len), r.times.fcfs_time))
    times.brute.append((time.perf_counter() - began) * 1e6)
    began = time.perf_counter()
    order = list(policy.order(0))
    times.whole.append((time.perf_counter() - began) * 1e6)
    if order != brute:
        raise BenchError("the order of the queue is not that of brute force")


def _run_through(memory: KVMemory, req: Req) -> None:
    if not memory.admit(req, NO_RESERVE, prefix_limit=req.longest_reusable_prefix):
        raise BenchError("a request got no memory")
    req.computed = req.known_len
    memory.share(req, req.computed)
    memory.finish(req)
