"""Checks the invariants of an instance that has become idle.

A check walks every page and every request, so it is made while no request waits for a step.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ...mem_cache.errors import InvariantViolation
from ...runtime import gc_control
from ..feature import Feature
from ..scheduler import Scheduler

INTERVAL = 1.0
"""Seconds between invariant checks of an idle instance that has run steps since the last one."""


class InvariantResult(NamedTuple):
    """Result of the last check of the invariants, and the number of steps before it; -1: there was none yet."""

    text: str | None = None
    step: int = -1

    @staticmethod
    def of(scheduler: Scheduler, last: InvariantResult) -> InvariantResult:
        """Check the invariants of ``scheduler`` if it is idle, and return the result; otherwise return ``last``.

        A violation is returned as text and not raised.
        """
        if not scheduler.is_idle:
            return last
        try:
            scheduler.check_invariants()
        except InvariantViolation as e:
            return InvariantResult(str(e), scheduler.counters.steps)
        return InvariantResult("ok", scheduler.counters.steps)


class IdleCheck(Feature):
    """The last verdict. ``tick`` is called after the last answer is sent: a check of a full cache takes up to 66 ms."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.verdict = InvariantResult()
        self._checked_at = 0.0
        self._checked_step = -1

    def newest(self) -> InvariantResult:
        """Check the invariants now if the instance is idle, and return the latest result; it does not raise."""
        self.verdict = InvariantResult.of(self._scheduler, self.verdict)
        return self.verdict

    def tick(self, now: float) -> None:
        """Check the invariants if the instance is idle and has run steps since the last check, at most every
        ``INTERVAL``.

        Raises ``InvariantViolation`` if one is violated: the process must not go on with wrong books.
        """
        steps = self._scheduler.counters.steps
        if now - self._checked_at >= INTERVAL and self._checked_step != steps and self._scheduler.is_idle:
            self._scheduler.check_invariants()
            self._checked_at, self._checked_step = now, steps
            self.verdict = InvariantResult("ok", steps)
            gc_control.collect_if_due()

    def seconds_left(self, now: float) -> float:
        """Return ``INTERVAL`` if steps have run since the last periodic check, otherwise infinity."""
        return math.inf if self._scheduler.counters.steps == self._checked_step else INTERVAL
