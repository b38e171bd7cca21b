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
from .policy_registry import SchedulePolicyName, reads_cache

DEFAULT_MAX_LOGPROBS = 1 << 18
"""About 5 MB in messages and 80 MiB in the HTTP process: 32k tokens with 7 alternatives each, 12k with 20."""


@section("Scheduling", order=70)
@dataclass(frozen=True, kw_only=True)
class ScheduleOptions(CacheOptions):
    """Options of the scheduler."""

    max_running_requests: int = opt(default=256, help="Most requests that hold KV memory at once.", at_least=1)
    max_queued_requests: int = opt(
        default=2048,
        help=(
            "Most requests that wait; one more is answered with 429, and with when half of them should have had "
            "their turn. Twice as many conversations may wait to be rendered by the chat template, half of them of "
            "one API key."
        ),
        at_least=1,
    )
    max_logprobs_per_request: int = opt(
        default=DEFAULT_MAX_LOGPROBS,
        help=(
            "Maximum number of log-probabilities that one request may ask for: its answers x (scored prompt tokens "
            "+ output tokens) x (1 + alternatives). A request for more is answered with 400, or 413 if only a batch "
            "comes to more. A request without a limit of output tokens gets as many as fit."
        ),
        at_least=1,
    )
    max_prefill_tokens: int = opt(default=8192, help="Most prompt tokens computed in one step.", at_least=1)
    chunked_prefill_size: int | None = opt(
        default=None,
        help=(
            "Most prompt tokens computed in one step, in pieces of a prompt where need be; -1 never cuts a prompt. "
            "Default 2048 on cuda, and on cpu 512, or less where a step in which nobody decodes would take more "
            "than 250 ms."
        ),
    )
    mixed_chunk_size: int | None = opt(
        default=None,
        help=(
            "The same for a step in which other requests decode, as they wait for it. Default: as "
            "chunked_prefill_size; without an ITL budget on cpu 128, and 16 in decode mode. Below page_size a "
            "prompt moves on within its pages."
        ),
    )
    itl_budget_ms: float | None = opt(
        default=None,
        help=(
            "Time that a step in which requests decode should take with the prompt tokens that ride along, in "
            "milliseconds; or 1.5 times what the decodes take alone, where that is more. How many tokens that is, "
            "is learned while serving. 0 switches it off, as --chunked-prefill-size -1 does. Default 40 on cpu, 0 "
            "on cuda."
        ),
    )
    ttft_target_ms: float | None = opt(
        default=None,
        help=(
            "Time to the first token that requests should not exceed, in milliseconds. Where the request that has "
            "waited longest is expected to exceed it, a step with prompts may take up to 6 times what one of a "
            "single token takes, even if that is more than --itl-budget-ms. 0 switches it off. Default 3000 on cpu, "
            "0 on cuda."
        ),
    )
    schedule_policy: SchedulePolicyName = opt(
        default="auto",
        help=(
            "Order of waiting requests: fcfs (first come, first served; prompts of a batch as if 0.1 s apart), srpf "
            "(shortest remaining prefill first, between pieces of longer prompts too, none of which waits for what "
            "comes later than 12 times its own time behind it), lpm (longest cached prefix first), dfs-weight (the "
            "same depth first, where most requests share a prefix), lof (longest output first), random (by "
            "random_seed), priority (fcfs within each priority, with --enable-priority-scheduling implied). auto "
            "takes fcfs in decode mode, else srpf."
        ),
    )
    enable_priority_scheduling: bool = opt(
        default=False,
        help='Let the "priority" of requests count before the policy: higher values first, without it 0.',
    )
    schedule_low_priority_values_first: bool = opt(default=False, help="With priorities, lower values go first.")
    priority_scheduling_preemption_threshold: int = opt(
        default=10,
        help=(
            "With priorities, a request takes the memory of running ones whose priority is further below its own "
            "than this."
        ),
    )
    fair_scheduling: bool = opt(
        default=False,
        help=(
            'Share the instance between those who compete for it: API keys, and below them the "user" that requests '
            "name. Who has been given least goes next, and a queue that is full has room for a key that has less "
            "than its part of it."
        ),
    )
    schedule_conservativeness: float = opt(
        default=1.0,
        help=(
            "Factor for the memory that is kept back for output, as it is foreseen from the lengths of earlier "
            "ones: above 1 admits fewer requests to avoid retraction, below 1 more."
        ),
        above=0,
    )
    disable_overlap_schedule: bool = opt(default=False, help="Plan a step only when the one before it is done.")
    stream_interval: int = opt(
        default=1,
        help=(
            "A streaming client gets its first token at once, then news every so many tokens; the end always at once."
        ),
        at_least=1,
    )
    random_seed: int = opt(default=0, help="Seed of dummy weights.", at_least=0)

    @property
    def uses_priorities(self) -> bool:
        """Whether the priorities of requests count."""
        return self.enable_priority_scheduling or self.schedule_policy == "priority"

    def problems(self) -> Iterator[str]:
        """Yield a complaint for each wrong option."""
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
