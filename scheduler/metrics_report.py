"""Sends the scheduler's counts to the HTTP process: pushed, so that a scrape never waits for a busy loop.

While requests run, that is at most every ``REPORT_SECONDS``. When the last one has ended, the report goes with the
tick's tokens, so a client that has its answer finds it counted. A tick between two reports costs a comparison.
"""

from __future__ import annotations

from collections import Counter
from operator import attrgetter

from ..messages.metrics import Family, Labelled, SchedulerMetrics
from ..runtime.metrics import Metrics, counter, gauge, read
from . import counters, itl_budget, kv_debug, memory_saver, memory_terms, planner, pressure, shared_prompts
from .estimates import cost_model
from .memory_saver import MemorySaver
from .outbox import Outbox
from .pressure import PressureMeter
from .req import ENDED, ReqState
from .scheduler import Scheduler

REPORT_SECONDS = 0.5
LIVING = tuple(state for state in ReqState if state not in ENDED)
STATE_OF = attrgetter("state")


class MetricsReport:
    """Sends ``SchedulerMetrics`` if something has changed. Called once a tick of the loop."""

    def __init__(self, scheduler: Scheduler, outbox: Outbox, occupation: MemorySaver | None = None) -> None:
        self._scheduler = scheduler
        self._occupation = occupation
        self.pressure = PressureMeter(scheduler)
        self._outbox = outbox
        self._last: SchedulerMetrics | None = None
        self._sent_at = float("-inf")

    def turn(self, now: float) -> None:
        """Send a report if one is due and something has changed; ``now``: ``time.monotonic()``."""
        self.pressure.turn(now)
        if self._scheduler.reqs and now - self._sent_at < REPORT_SECONDS:
            return
        metrics = take_metrics(self._scheduler)
        metrics.families += read(pressure.METRICS, self.pressure.level(now))
        metrics.families += read(memory_saver.METRICS, self._occupation)
        self._sent_at = now
        if metrics != self._last:
            self._last = metrics
            self._outbox.answer(metrics)


def take_metrics(scheduler: Scheduler) -> SchedulerMetrics:
    """Read the metrics of the scheduler and of all its parts."""
    planned, tiers = scheduler.planner, scheduler.tiers
    families: list[Family] = [
        *read(METRICS, scheduler),
        *read(memory_terms.METRICS, scheduler.memory.usage()),
        *read(counters.METRICS, scheduler.counters),
        *read(planner.METRICS, planned),
        *read(shared_prompts.METRICS, planned.shared_prompts),
        *read(itl_budget.METRICS, planned.budget.itl),
        *read(cost_model.METRICS, scheduler.estimator.model),
        *scheduler.handovers.metrics(),
        *(tiers.metrics() if tiers is not None else ()),
        *read(kv_debug.METRICS, scheduler.memory.debug),
    ]
    return SchedulerMetrics(scheduler.role, families)


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
