"""``pdserve bench schedule``: a trace through the real scheduler in virtual time, by policy and rule of admission."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass

import msgspec
import numpy as np

from ...scheduler.options import SchedulerOptions
from ..errors import BenchError
from ..prompts import TokenRange
from ..trace import TraceReplay, read_trace
from .options import Rule, ScheduleBenchOptions, TracePolicyName
from .ratio import RatioAdmission
from .virtual_instance import NEVER, Job, Outcome, VirtualInstance, ttft_ms

SHORT, LONG = 0.25, 0.9
"""The shortest quarter of the prompts, and the longest tenth."""


@dataclass(frozen=True)
class Result:
    """Result of one run: TTFT in ms (mean and P99 of short, long and all prompts) and tokens.

    ``plan_us`` is the scheduler's own time per step, by this machine's clock.
    """

    policy: TracePolicyName
    admission: Rule
    short_mean: float
    short_p99: float
    long_mean: float
    long_p99: float
    all_mean: float
    all_p99: float
    seconds: float
    output_rate: float
    retractions: int
    recomputed_tokens: int
    hit_rate: float
    steps: int
    plan_us: float


def run_schedule_bench(options: ScheduleBenchOptions) -> int:
    """Run the trace for each policy and admission rule, print a table and write the file. Returns the exit code.

    Requests that do not fit the pool by themselves are left out.
    """
    assert options.trace is not None
    try:
        entries = read_trace(options.trace, options.num_requests)
        replay = TraceReplay(TokenRange(1000, 29999), (0,), options.length_scale, options.time_scale)
        jobs = []
        for i, (entry, request) in enumerate(zip(entries, replay.replay(entries), strict=True)):
            prompt = request.spec.prompt
            assert not isinstance(prompt, str)
            most = max(1, round(options.max_tokens * options.output_scale))
            output = min(most, max(1, round(entry.output_length * options.output_scale)))
            if options.prefill_only:
                output = most = 1
            if len(prompt) + most <= options.pool_tokens:
                jobs.append(Job(f"r{i}", request.at, prompt, output, most))
        if not jobs:
            raise BenchError(f"no request fits a pool of {options.pool_tokens:,} tokens; use more --pool-tokens")
        _describe(options, jobs)
        results = []
        for policy in options.policies:
            for rule in options.admission:
                results.append(_run(options, policy, rule, jobs))
                _print(results[-1])
    except BenchError as e:
        print(f"pdserve bench schedule: {e}", file=sys.stderr)
        return 1
    if options.output_json is not None:
        options.output_json.write_bytes(msgspec.json.encode([asdict(r) for r in results]))
    return 0


def _run(options: ScheduleBenchOptions, policy: TracePolicyName, rule: Rule, jobs: list[Job]) -> Result:
    server = SchedulerOptions(
        schedule_policy=policy,
        schedule_conservativeness=options.conservativeness,
        page_size=options.page_size,
        max_total_tokens=options.pool_tokens,
        max_running_requests=options.max_running_requests,
        max_queued_requests=len(jobs),
        chunked_prefill_size=options.chunked_prefill_size,
        itl_budget_ms=options.itl_budget_ms,
        stream_interval=NEVER,
    )
    instance = VirtualInstance(server, max(len(job.prompt) + job.max_tokens for job in jobs))
    if rule == "ratio":
        _use_ratio(instance, options.conservativeness)
    start, began = instance.now, time.process_time()
    instance.run(jobs)
    took = time.process_time() - began
    outcomes = list(instance.outcomes.values())
    return _result(policy, rule, instance, outcomes, start, took)


def _use_ratio(instance: VirtualInstance, conservativeness: float) -> None:
    planner = instance.scheduler.planner
    ratio = planner.claims.admission = RatioAdmission(instance.scheduler.memory, conservativeness)
    plan = planner.plan

    def counted(now: float) -> object:
        before = planner.retraction.count
        step = plan(now)
        if step is not None:
            ratio.step_done(planner.retraction.count - before)
        return step

    planner.plan = counted  # type: ignore[method-assign,assignment]


def _result(
    policy: TracePolicyName, rule: Rule, instance: VirtualInstance, outcomes: list[Outcome], start: float, took: float
) -> Result:
    ttft = ttft_ms(outcomes, start)
    lengths = np.array([len(o.job.prompt) for o in outcomes])
    low, high = np.quantile(lengths, [SHORT, LONG])
    short, long = ttft[lengths <= low], ttft[lengths >= high]
    planner, counters = instance.scheduler.planner, instance.scheduler.counters
    seconds = instance.now - start
    return Result(
        policy=policy,
        admission=rule,
        short_mean=float(short.mean()),
        short_p99=float(np.quantile(short, 0.99)),
        long_mean=float(long.mean()),
        long_p99=float(np.quantile(long, 0.99)),
        all_mean=float(ttft.mean()),
        all_p99=float(np.quantile(ttft, 0.99)),
        seconds=seconds,
        output_rate=sum(o.job.output_len for o in outcomes) / seconds,
        retractions=planner.retraction.count,
        recomputed_tokens=counters.recomputed_tokens,
        hit_rate=planner.hit_tokens / max(1, planner.asked_tokens),
        steps=counters.steps,
        plan_us=took / max(1, counters.steps) * 1e6,
    )


HEAD = (
    "| policy | admission | TTFT short: mean | P99 | long: mean | P99 | all: mean | P99 | virtual s | output tok/s | "
    "retractions | recomputed | hits | steps | µs a step |"
)


def _describe(options: ScheduleBenchOptions, jobs: list[Job]) -> None:
    lengths = np.array([len(job.prompt) for job in jobs])
    outputs = np.array([job.output_len for job in jobs])
    assert options.trace is not None
    print(
        f"{options.trace.name}: {len(jobs)} requests in {jobs[-1].at:.0f} s, prompts of {lengths.mean():.0f} tokens "
        f"(a quarter up to {np.quantile(lengths, SHORT):.0f}, a tenth from {np.quantile(lengths, LONG):.0f}), outputs "
        f"of {outputs.mean():.0f}; a pool of {options.pool_tokens}. TTFT in ms.\n"
    )
    print(HEAD)
    print("|---|---|" + "---:|" * 13, flush=True)


def _print(r: Result) -> None:
    ttft = (r.short_mean, r.short_p99, r.long_mean, r.long_p99, r.all_mean, r.all_p99)
    print(
        f"| {r.policy} | {r.admission} | "
        + " | ".join(f"{ms:,.0f}" for ms in ttft)
        + f" | {r.seconds:,.0f} | {r.output_rate:.1f} | {r.retractions} | {r.recomputed_tokens:,} | {r.hit_rate:.3f} "
        f"| {r.steps:,} | {r.plan_us:.0f} |",
        flush=True,
    )
