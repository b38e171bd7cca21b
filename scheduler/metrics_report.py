"""Tells the HTTP process what the scheduler counts: pushed, so that a scrape never waits for a busy loop.

While requests run, at most every ``REPORT_SECONDS``; when the last one has ended, with the turn's tokens, so that a
client that has its answer finds it counted. A turn between two reports costs a comparison.
"""

from __future__ import annotations

from collections import Counter
from operator import attrgetter

from ..messages.metrics import PoolUsage, SchedulerMetrics
from .memory_saver import MemorySaver
from .outbox import Outbox
from .pressure import PressureMeter
from .req import ENDED, ReqState
from .scheduler import Scheduler

REPORT_SECONDS = 0.5
LIVING = tuple(state for state in ReqState if state not in ENDED)
STATE_OF = attrgetter("state")


class MetricsReport:
    """Sends ``SchedulerMetrics`` where something has changed. Called once a turn of the loop."""

    def __init__(self, scheduler: Scheduler, outbox: Outbox, occupation: MemorySaver | None = None) -> None:
        self._scheduler = scheduler
        self._occupation = occupation
        self.pressure = PressureMeter(scheduler)
        self._outbox = outbox
        self._last: SchedulerMetrics | None = None
        self._sent_at = float("-inf")

    def turn(self, now: float) -> None:
        """``now``: ``time.monotonic()``."""
        self.pressure.turn(now)
        if self._scheduler.reqs and now - self._sent_at < REPORT_SECONDS:
            return
        metrics = take_metrics(self._scheduler)
        metrics.pressure = self.pressure.level(now)
        if self._occupation is not None:
            metrics.released = list(self._occupation.released)
        self._sent_at = now
        if metrics != self._last:
            self._last = metrics
            self._outbox.answer(metrics)


def take_metrics(scheduler: Scheduler) -> SchedulerMetrics:
    """What is counted now."""
    counters, planner = scheduler.counters, scheduler.planner
    states = Counter(map(STATE_OF, scheduler.reqs.values()))
    usage, itl, handovers = scheduler.memory.usage(), planner.budget.itl, scheduler.handovers
    return SchedulerMetrics(
        draining=scheduler.draining,
        role=scheduler.role,
        # A state that nobody is in is told as well, or its gauge would stay where it was.
        states={state.value: states[state] for state in LIVING},
        pool=PoolUsage(usage["total"], usage["free"], usage["cached"], usage["in_use"]),
        prompt_tokens=counters.prompt_tokens,
        cached_tokens=planner.cached_tokens,
        recomputed_tokens=counters.recomputed_tokens,
        decode_tokens=counters.decode_tokens,
        asked_tokens=planner.asked_tokens,
        hit_tokens=planner.hit_tokens,
        retractions=planner.retractions,
        preemptions=planner.preemptions,
        followers=planner.shared_prompts.set_aside,
        step_seconds=counters.step_seconds.copy(),
        compiled_kernels=counters.compiled_kernels,
        cost_model_error=scheduler.estimator.model.median_error,
        promises=itl.counts() if itl is not None else None,
        handovers=handovers.counts() if handovers is not None else None,
        tiers=scheduler.tiers.metrics() if scheduler.tiers is not None else None,
        kv_debug=scheduler.memory.debug.metrics() if scheduler.memory.debug is not None else None,
    )
