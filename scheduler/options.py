"""Options of the scheduler: how many requests, in which order, and how long a step may take."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..mem_cache.options import CacheOptions, KVEventOptions
from ..mem_cache.storage.options import TierOptions
from ..model_files.options import ModelOptions
from ..runtime.options import opt, section
from ..runtime.process_options import ChildOptions
from ..runtime.rank_options import RankOptions
from .policy_registry import SchedulePolicyName, implies_priorities, reads_cache

DEFAULT_MAX_LOGPROBS = 1 << 18
"""About 5 MB in messages and 80 MiB in the HTTP process: 32k tokens with 7 alternatives each, 12k with 20."""


@section("Scheduling", order=70)
@dataclass(frozen=True, kw_only=True)
class ScheduleOptions(CacheOptions):
    """Options of the scheduler."""

    max_running_requests: int = opt(default=256, help="Maximum requests that hold KV memory at a time.", at_least=1)
    max_queued_requests: int = opt(
        default=2048,
        help=(
            "Maximum waiting requests; more are answered with 429 and an estimated Retry-After. Twice as many "
            "conversations may wait for the chat template, half of them from one API key."
        ),
        at_least=1,
    )
    max_logprobs_per_request: int = opt(
        default=DEFAULT_MAX_LOGPROBS,
        help=(
            "Maximum log-probabilities of one request: answers x (scored prompt tokens + output tokens) x (1 + "
            "alternatives). More are a 400, or a 413 if only the whole batch exceeds it. A request without an "
            "output limit gets as many tokens as fit."
        ),
        at_least=1,
    )
    max_prefill_tokens: int = opt(default=8192, help="Maximum prompt tokens computed in one step.", at_least=1)
    chunked_prefill_size: int | None = opt(
        default=None,
        help=(
            "Maximum prompt tokens computed in one step; longer prompts are divided into chunks. -1: never divide. "
            "Default: 2048 on cuda; 512 on cpu, or less if a step without decodes would take more than 250 ms."
        ),
    )
    mixed_chunk_size: int | None = opt(
        default=None,
        help=(
            "Maximum prompt tokens in a step with decodes. Default: --chunked-prefill-size; without an ITL budget "
            "128 on cpu, 16 in decode mode there. May be below --page-size."
        ),
    )
    itl_budget_ms: float | None = opt(
        default=None,
        help=(
            "Target time in milliseconds of a step that computes prompt tokens beside decodes, or 1.5 times the "
            "decodes alone if that is longer. The number of prompt tokens is learned while serving. 0, or "
            "--chunked-prefill-size -1: no budget. Default: 40 on cpu, 0 on cuda."
        ),
    )
    ttft_target_ms: float | None = opt(
        default=None,
        help=(
            "Target time to first token in milliseconds. If a prompt in progress, or the next that fits in memory, "
            "is expected to exceed it, steps with prompts may take up to 6 times the time of a single token, even "
            "beyond --itl-budget-ms. 0: no target. Default: 3000 on cpu, 0 on cuda."
        ),
    )
    schedule_policy: SchedulePolicyName = opt(
        default="auto",
        help=(
            "Order of waiting requests: fcfs (arrival; prompts of a batch count as 0.1 s apart), srpf (shortest "
            "remaining prefill, with aging: at most 12 times a prompt's own time), lpm (longest cached prefix), "
            "dfs-weight (largest shared prefix, depth first), lof (longest output), random (by --random-seed), "
            "priority (fcfs within each priority; implies --enable-priority-scheduling). With lpm, dfs-weight, lof and "
            "random a request may wait without limit while others that go before it keep coming. auto: fcfs in decode "
            "mode, else srpf."
        ),
    )
    enable_priority_scheduling: bool = opt(
        default=False,
        help='Order requests by their "priority" before the policy, higher values first; 0 if a request has none.',
    )
    schedule_low_priority_values_first: bool = opt(default=False, help="With priorities: lower values first.")
    priority_scheduling_preemption_threshold: int = opt(
        default=10,
        help=(
            "With priorities: a waiting request takes the memory of running requests with a priority that is lower "
            "by more than this."
        ),
    )
    fair_scheduling: bool = opt(
        default=False,
        help=(
            'Share the instance fairly between API keys, and within a key between the "user" names of its requests. '
            "The one with the least service goes next. A full queue accepts requests of keys below their share."
        ),
    )
    schedule_conservativeness: float = opt(
        default=1.0,
        help=(
            "Factor on the memory reserved for expected output. Above 1: fewer running requests, fewer retractions. "
            "Below 1: more."
        ),
        above=0,
    )
    disable_overlap_schedule: bool = opt(default=False, help="Plan a step only after the previous one is done.")
    stream_interval: int = opt(
        default=1,
        help="Tokens between two events of a stream. The first token and the end are sent at once.",
        at_least=1,
    )
    random_seed: int = opt(default=0, help="Seed of dummy weights and of --schedule-policy random.", at_least=0)

    @property
    def uses_priorities(self) -> bool:
        """Whether requests are ordered by their ``priority``."""
        return self.enable_priority_scheduling or implies_priorities(self.schedule_policy)

    def problems(self) -> Iterator[str]:
        """Yield a complaint for each wrong scheduling option, with its value and what to do."""
        yield from self._chunk_problems()
        if self.priority_scheduling_preemption_threshold < 0:
            yield "--priority-scheduling-preemption-threshold must be 0 or more"
        if not self.uses_priorities and self.schedule_low_priority_values_first:
            yield "--schedule-low-priority-values-first says how to read priorities: add --enable-priority-scheduling"
        budget = self.itl_budget_ms
        if budget is not None and not (budget >= 0 and math.isfinite(budget)):
            yield f"--itl-budget-ms is {budget:g}: it is a time in milliseconds, like 40, or 0 for no budget"
        target = self.ttft_target_ms
        if target is not None and not (target >= 0 and math.isfinite(target)):
            yield f"--ttft-target-ms is {target:g}: it is a time in milliseconds, like 3000, or 0 for no target"
        if target and budget == 0:
            yield "--ttft-target-ms raises what --itl-budget-ms allows, and that is switched off: drop one of the two"
        if self.chunked_prefill_size == -1 and budget:
            yield "--itl-budget-ms cuts prompts, and --chunked-prefill-size -1 forbids it: drop one of the two"
        if reads_cache(self.schedule_policy) and self.disable_radix_cache:
            yield (
                f"--schedule-policy {self.schedule_policy} orders requests by their cached prefix, and "
                "--disable-radix-cache keeps none: "
                "drop one of the two"
            )

    def _chunk_problems(self) -> Iterator[str]:
        page_size, uncut = max(self.page_size, 1), self.chunked_prefill_size == -1
        chunks = {"--chunked-prefill-size": self.chunked_prefill_size, "--mixed-chunk-size": self.mixed_chunk_size}
        for name, chunk in chunks.items():
            if chunk is None or (uncut and name == "--chunked-prefill-size"):
                continue
            if name == "--mixed-chunk-size" and 1 <= chunk < page_size:
                continue
            if chunk < page_size or chunk % page_size:
                example = max(chunk // page_size, 1) * page_size
                yield (
                    f"{name} is {chunk}: prompts are cut at page borders, so give a multiple of --page-size "
                    f"{page_size}, like {example}{', or -1 to never cut' if name == '--chunked-prefill-size' else ''}"
                )
        if uncut and self.mixed_chunk_size is not None:
            yield "--mixed-chunk-size cuts prompts, and --chunked-prefill-size -1 forbids it: drop one of the two"


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions(ScheduleOptions, TierOptions, KVEventOptions, ModelOptions, RankOptions, ChildOptions):
    """Every option that the scheduler's process reads."""
