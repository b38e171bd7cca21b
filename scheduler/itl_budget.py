"""The limit on gaps between tokens: how long a step with prompt pieces in it may take.

Every decoding request waits for the pieces that share its step. So a step may take ``--itl-budget-ms``. If the decodes
alone are slow already, it may take ``STRETCH`` times as long as they do. The cost model decides which pieces fit. On a
processor that is bound by memory, tokens up to the knee of its curve cost next to nothing, so all are taken.

The promise is about the time between two results, which the client sees. It holds for nearly every step, not for half
of them as an estimate does. So the limit of the estimate is the promise, divided by a margin, less the time between
steps. The margin is the factor that one outcome in a hundred exceeds. It is learned, too, and capped, because no margin
helps against other load that uses the processor for long.

With a large model, a step of one token may take as long as that already, since it reads all weights. Then prompts have
a third of each step, and the machine reads the weights three times as often as necessary. So with ``--ttft-target-ms``
a step may take up to ``MOST_STRETCH`` times what one of a single token takes, if first tokens are late. The prompts in
progress count, and the next one that fits in memory. The factor is their longest estimated TTFT, divided by the target.
More would gain little, and nothing where small steps are cheap: there prompts have most of each step anyway.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..runtime.metrics import Metrics, counter
from .estimates.cost_model import CostModel, StepShape

STRETCH, MOST_STRETCH, STRETCH_GAIN = 1.5, 6.0, 1.1
"""Factors on the time of a step. It may take ``STRETCH`` times what its decodes alone take.

With a TTFT target it may take up to ``MOST_STRETCH`` times what a single token takes. That factor changes by at most
``STRETCH_GAIN`` from step to step.
"""
FIRST_MARGIN, MAX_MARGIN = 1.25, 1.6
MARGIN_GAIN, EXCEEDING = 0.05, 0.01
"""Gain of the margin's steps, and the share of outcomes above it.

With one outcome in 100 above the margin, steps up of 0.99 × the gain and steps down of 0.01 × the gain balance.
"""


SINGLE = StepShape(decodes=1)


class Promise(NamedTuple):
    """Estimate and limit of the time between the result before a step and its own."""

    estimate_ms: float
    limit_ms: float


class ItlBudget:
    """The limit of each step with prompt pieces, and counts of how it was kept.

    ``ttft_target_ms``: 0 for none. ``stretch``: factor on a single token's step that a step may take in any case.
    """

    def __init__(self, budget_ms: float, model: CostModel, ttft_target_ms: float = 0.0) -> None:
        self.budget_ms = budget_ms
        self.ttft_target_ms = ttft_target_ms
        self.stretch = STRETCH
        self.margin = FIRST_MARGIN
        self._model = model
        self.steps = 0
        self.steps_over = 0
        self._over_estimate_ms = 0.0
        self._over_outcome_ms = 0.0
        self._worst = Promise(0.0, 0.0)
        self._worst_ms = 0.0

    def limit_ms(self, decodes: StepShape) -> float:
        """Return the longest time between two results, in milliseconds, that these decodes are promised beside prompt
        tokens.

        It is at least the budget, more if the decodes alone are slow, and more if first tokens are late.
        """
        estimate, overhead_ms = self._model.estimate, self._model.overhead_ms
        limit_ms = max(self.budget_ms, STRETCH * (estimate(decodes) + overhead_ms))
        return max(limit_ms, self.stretch * (estimate(SINGLE) + overhead_ms)) if self.ttft_target_ms else limit_ms

    def relax(self, first_token_ms: float) -> None:
        """Move ``stretch``, by a small factor for each call, towards what a request with this estimated TTFT needs."""
        wanted = STRETCH * max(1.0, first_token_ms / self.ttft_target_ms)
        wanted = min(wanted, MOST_STRETCH, self.stretch * STRETCH_GAIN)
        self.stretch = max(wanted, self.stretch / STRETCH_GAIN)

    def forward_ms(self, limit_ms: float) -> float:
        """Return the largest estimate of ``forward_ms`` that keeps a step within ``limit_ms``."""
        return limit_ms / self.margin - self._model.overhead_ms

    def promise(self, estimate_ms: float, limit_ms: float) -> Promise:
        """Return the promise of a planned step: the expected time between two results, and the limit ``limit_ms``.

        ``estimate_ms``: estimate of its ``forward_ms`` alone.
        """
        return Promise(estimate_ms + self._model.overhead_ms, limit_ms)

    def learn(self, promise: Promise, outcome_ms: float) -> None:
        """Learn the margin from a step with ``outcome_ms`` between two results, and count it if above its limit."""
        exceeds = outcome_ms > self.margin * promise.estimate_ms
        self.margin *= 1 + MARGIN_GAIN * ((1 - EXCEEDING) if exceeds else -EXCEEDING)
        self.margin = min(max(self.margin, 1.0), MAX_MARGIN)
        self.steps += 1
        if outcome_ms <= promise.limit_ms:
            return
        self.steps_over += 1
        self._over_estimate_ms += promise.estimate_ms
        self._over_outcome_ms += outcome_ms
        if outcome_ms > self._worst_ms:
            self._worst, self._worst_ms = promise, outcome_ms

    def info(self) -> dict[str, Any]:
        """Return limits, margin and broken promises since the start, times in milliseconds, JSON-ready."""
        over = max(self.steps_over, 1)
        return {
            "budget_ms": self.budget_ms,
            "ttft_target_ms": self.ttft_target_ms,
            "stretch": round(self.stretch, 3),
            "margin": round(self.margin, 3),
            "steps": self.steps,
            "steps_over": self.steps_over,
            "over_estimate_ms": round(self._over_estimate_ms / over, 3),
            "over_outcome_ms": round(self._over_outcome_ms / over, 3),
            "worst": {
                "estimate_ms": round(self._worst.estimate_ms, 3),
                "limit_ms": round(self._worst.limit_ms, 3),
                "outcome_ms": round(self._worst_ms, 3),
            },
        }


METRICS: Metrics[ItlBudget] = (
    counter(
        "pdserve_itl_budget_steps_total",
        "Steps with prompts that streams waited for, by whether they kept --itl-budget-ms.",
        lambda b: {"kept": b.steps - b.steps_over, "broken": b.steps_over},
        "outcome",
        note="Outcomes: `kept`, `broken`. Absent without a budget.",
    ),
)
