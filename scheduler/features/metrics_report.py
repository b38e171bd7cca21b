"""Sends the scheduler's counts to the HTTP process: pushed, so that a scrape never waits for a busy loop.

While requests run, that is at most every ``REPORT_SECONDS``. When the last one has ended, the report goes with the
tick's tokens, so a client that has its answer finds it counted. A tick between two reports costs a comparison.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import attrgetter

from ...messages.metrics import Family, Labelled, SchedulerMetrics
from ...runtime.metrics import Metrics, counter, gauge, read
from .. import counters, itl_budget, memory_terms, planner, shared_prompts
from ..estimates import cost_model
from ..feature import Feature
from ..req import ENDED, ReqState
from ..scheduler import Scheduler

REPORT_SECONDS = 0.5
LIVING = tuple(state for state in ReqState if state not in ENDED)
STATE_OF = attrgetter("state")


class MetricsReport(Feature):
    """Sends ``SchedulerMetrics``, with the metrics of ``features``, if something has changed."""

    def __init__(self, scheduler: Scheduler, features: Sequence[Feature]) -> None:
        self._scheduler = scheduler
        self._features = features
        self._last: SchedulerMetrics | None = None
        self._sent_at = float("-inf")

    def tick(self, now: float) -> None:
        """Send the metrics to the HTTP process if they have changed; while requests are live, at most every
        ``REPORT_SECONDS``.
        """
        if self._scheduler.reqs and now - self._sent_at < REPORT_SECONDS:
            return
        families = take_metrics(self._scheduler) + [f for part in self._features for f in part.metrics(now)]
        metrics = SchedulerMetrics(self._scheduler.role, families)
        self._sent_at = now
        if metrics != self._last:
            self._last = metrics
            self._scheduler.outbox.answer(metrics)


def take_metrics(scheduler: Scheduler) -> list[Family]:
    """Read the metrics of the scheduler and of its parts."""
    planned = scheduler.planner
    return [
        *read(METRICS, scheduler),
        *read(memory_terms.METRICS, scheduler.memory.pool.usage()),
        *read(counters.METRICS, scheduler.counters),
        *read(planner.METRICS, planned),
        *read(shared_prompts.METRICS, planned.shared_prompts),
        *read(itl_budget.METRICS, planned.budget.itl),
        *read(cost_model.METRICS, scheduler.estimator.model),
    ]


def _by_state(scheduler: Scheduler) -> Labelled:
    """Count living requests by state. A state without requests is shown as 0: its gauge would keep its last value."""
    states = Counter(map(STATE_OF, scheduler.reqs.values()))
    return {state.value: states[state] for state in LIVING}


METRICS: Metrics[Scheduler] = (
    gauge("pdserve_draining", "1 while the instance admits nothing more.", lambda s: int(s.draining)),
    gauge(
        "pdserve_requests",
        "Requests in the scheduler by state.",
        _by_state,
        "state",
        note="States: `waiting`, `prefilling`, `running`, and of hand-overs `bootstrapping`, `preallocated`, "
        "`transferring`, `sending`.",
    ),
    counter(
        "pdserve_prompt_tokens_total",
        "Prompt tokens by where they came from: computed here, or cached here for a prompt computed here.",
        lambda s: {"computed": s.counters.prompt_tokens, "cached": s.planner.cached_tokens},
        "source",
    ),
)
