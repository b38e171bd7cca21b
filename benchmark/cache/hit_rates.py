"""Hit rates of a trace by eviction policy and size of the pool: the real scheduler and tree, in virtual time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...mem_cache.eviction_policies import EvictionPolicyName
from ...mem_cache.pages import floor_to_page
from ...messages.base import I32
from ...scheduler.options import SchedulerOptions
from ..errors import BenchError
from ..prompts import TokenRange
from ..schedule.virtual_instance import NEVER, Job, VirtualInstance
from ..trace import TraceReplay, read_trace
from .options import CacheBenchOptions


@dataclass(frozen=True)
class HitRate:
    """Result of one run.

    ``share`` is the part of all different tokens that fits the pool. ``rate`` is the part of prompt tokens with a hit.
    """

    policy: EvictionPolicyName
    share: float
    pool_tokens: int
    rate: float
    retractions: int
    requests: int


@dataclass(frozen=True)
class TraceTotals:
    """Tokens of all prompts, those that differ by their prefix, and the hit rate where nothing is ever evicted."""

    prompt_tokens: int
    different_tokens: int
    bound: float


def make_jobs(options: CacheBenchOptions) -> list[Job]:
    """Read the trace, and return its requests with scaled lengths in order of arrival; raises ``WorkloadError``."""
    assert options.trace is not None
    entries = read_trace(options.trace, options.num_requests)
    replay = TraceReplay(TokenRange(1000, 29999), (0,), options.length_scale, 1.0)
    jobs = []
    for i, request in enumerate(replay.replay(entries)):
        prompt = request.spec.prompt
        assert not isinstance(prompt, str)
        jobs.append(Job(f"r{i}", request.at, prompt, request.spec.output_len, request.spec.output_len))
    return jobs


def totals(jobs: list[Job], page_size: int) -> TraceTotals:
    """Count the tokens of all prompts, and the hits of a cache that never evicts anything.

    Each prompt is compared with all earlier ones, page by page; pages are identified by their whole prefix. A prompt's
    last token is always computed.
    """
    seen: set[bytes | int] = set()
    tokens = hits = 0
    for job in jobs:
        prompt: I32 = np.asarray(job.prompt, dtype=np.int32)
        tokens += len(prompt)
        prefix, is_known = 0, True
        reusable = floor_to_page(len(prompt) - 1, page_size)
        for start in range(0, floor_to_page(len(prompt), page_size), page_size):
            # The hash of what lies before stands for it: 64 bits for some hundred thousand pages.
            prefix = hash((prefix, prompt[start : start + page_size].tobytes()))
            is_known = is_known and prefix in seen
            seen.add(prefix)
            hits += page_size if is_known and start < reusable else 0
    return TraceTotals(tokens, len(seen) * page_size, hits / tokens)


def hit_rate(
    options: CacheBenchOptions, policy: EvictionPolicyName, share: float, jobs: list[Job], different: int
) -> HitRate:
    """Run ``jobs`` once through the scheduler in virtual time, and return the hit rate with other counts.

    ``different``: tokens of the trace's different pages. ``share``: the KV pool's size, as a share of these. Requests
    that do not fit the pool by themselves are left out. Raises ``BenchError`` if none fits.
    """
    page = options.page_size
    pool = max(page, round(different * share) // page * page)
    fitting = [job for job in jobs if len(job.prompt) + job.max_tokens <= pool]
    if not fitting:
        raise BenchError(f"no request fits a pool of {pool:,} tokens; use a larger --pool-share")
    server = SchedulerOptions(
        radix_eviction_policy=policy,
        page_size=page,
        max_total_tokens=pool,
        max_running_requests=64,
        max_queued_requests=len(jobs),
        chunked_prefill_size=512,
        schedule_policy="fcfs",
        stream_interval=NEVER,
    )
    instance = VirtualInstance(server, max(len(job.prompt) + job.max_tokens for job in fitting))
    instance.run(fitting)
    planner = instance.scheduler.planner
    instance.scheduler.check_invariants()
    rate = planner.hit_tokens / max(1, planner.asked_tokens)
    return HitRate(policy, share, pool, rate, planner.retraction.count, len(fitting))


def table(rates: list[HitRate], bound: float) -> str:
    """Return a Markdown table of hit rates: a row for each pool size, a column for each policy, and one for the bound.

    ``bound``: the hit rate of a cache that never evicts.
    """
    policies = list(dict.fromkeys(rate.policy for rate in rates))
    lines = ["| pool, % of the trace | tokens | " + " | ".join(policies) + " | bound |"]
    lines.append("|---:|---:|" + "---:|" * (len(policies) + 1))
    for share in dict.fromkeys(rate.share for rate in rates):
        row = {rate.policy: rate for rate in rates if rate.share == share}
        cells = [f"{row[p].rate:.3f}" if p in row else "" for p in policies]
        pool = next(iter(row.values())).pool_tokens
        lines.append(f"| {share:.0%} | {pool:,} | " + " | ".join(cells) + f" | {bound:.3f} |")
    return "\n".join(lines)


def draw(path: Path, rates: list[HitRate], bound: float) -> None:
    """Draw hit rates against the pool's size, a line for each policy, into the file ``path``.

    ``bound``: the hit rate of a cache that never evicts, drawn as a dashed line.
    """
    from .. import chart

    with chart.style():
        figure, (axes,) = chart.new_figure(width=7.0, height=3.8)
        for i, policy in enumerate(dict.fromkeys(rate.policy for rate in rates)):
            points = sorted((rate.share * 100, rate.rate) for rate in rates if rate.policy == policy)
            # Policies agree often: a line that lies over another is the thinner one.
            (line,) = axes.plot(*zip(*points, strict=True), "o-", label=policy, color=chart.color(i))
            line.set_linewidth(max(1.2, 5.6 - 1.1 * i))
            line.set_markersize(max(3.0, 9.0 - 1.5 * i))
        axes.axhline(bound, linestyle="--", color="#555555", linewidth=1.2, label="infinite cache")
        axes.set(xscale="log", ylim=(0, None), title="Hit rate by eviction policy")
        axes.set(xlabel="KV pool, % of the trace's different tokens", ylabel="share of prompt tokens")
        ticks = sorted({rate.share * 100 for rate in rates})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.legend(loc="lower right")
        chart.save(figure, path)
