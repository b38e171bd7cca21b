"""Lets prompts that come together begin to decode together, if their first tokens come sooner on average.

While no request decodes, a step is full of prompt tokens. As soon as one request decodes, the ITL budget leaves later
prompts a part of each step. That is half or a third if reading the weights bounds a step. So of a batch that arrives at
once, the first few get their first tokens early. All others wait several times as long as their prompts take.

This module holds back prompts that would be complete, by their last token, while the others are computed at full speed.
Let ``ready`` requests be held for as long as the ``others`` take at full speed. Let ``slowdown`` be the factor by which
these would be slower beside the decodes. Then the sum of all TTFTs is shorter if

    ready < others × (slowdown - 1)

No gap grows, since none has begun. A request is not held for prompts that are much longer than its own. Nor is it held
longer than ``MOST_SECONDS`` after its arrival, or ``MOST_TIMES`` as long as its own prompt takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from .estimates.cost_model import CostModel, StepShape
from .policies.by_remaining import left_of
from .req import Req, Route
from .step_budget import StepAllowance, StepBudget

MOST_SECONDS, MOST_TIMES = 4.0, 16.0
"""Latest first token of a request that is held, after its arrival: seconds, and a multiple of its own prompt's time.

The later of the two counts.
"""
ALIKE = 4.0
"""A request is not held for a prompt with more than this many times its own tokens left."""
LEAST_GAIN, MOST_OTHERS = 0.1, 16
"""Minimum slowdown that makes a look at the queue worthwhile, and the maximum number of requests looked at."""


class JointStart:
    """Decides, for each step without decodes, whether prompts may be completed in it."""

    def __init__(self, budget: StepBudget, model: CostModel) -> None:
        self._budget = budget
        self._model = model

    def holds(self, allowance: StepAllowance, prompts: Iterable[Req], now: float) -> bool:
        """Return whether the step with this ``allowance`` should leave the last token of each prompt to a later step.

        So no request begins to decode yet, and the prompts that follow are computed faster. ``prompts``: those to
        compute here, in order, as far as they may have memory.
        """
        if self._budget.itl is None or not self._budget.may_cut or allowance.is_timed:
            return False
        token_ms = self._step_ms(StepShape(), allowance.tokens) / allowance.tokens
        ready: list[Req] = []
        shortest = total = 0
        latest = needed = math.inf
        for req in prompts:
            if not _will_decode(req):
                return False
            left = left_of(req)
            total += left
            if total <= allowance.tokens:
                ready.append(req)
                shortest = min(shortest or req.total_len, req.total_len)
                own_seconds = req.total_len * token_ms / 1000
                latest = min(latest, req.times.arrival + max(MOST_SECONDS, MOST_TIMES * own_seconds))
                continue
            if needed == math.inf:
                needed = len(ready) / max(self._slowdown(ready, token_ms) - 1, LEAST_GAIN)
            needed -= 1
            if left > ALIKE * shortest or now + total * token_ms / 1000 > latest or needed > MOST_OTHERS:
                return False
            if needed < 0:
                return True
        return False

    def _slowdown(self, ready: list[Req], token_ms: float) -> float:
        """Return how many times as long a prompt token would take beside the decodes of the ``ready`` requests.

        ``token_ms``: milliseconds of a prompt token without decodes. Return 1000 if no piece would fit beside them.
        """
        decodes = StepShape(len(ready), sum(req.total_len for req in ready))
        allowance = self._budget.allowance(decodes, awaited=False, refused=0)
        piece = self._budget.fitting(allowance, decodes, 0, allowance.tokens)
        if piece <= 0:
            return 1e3
        return self._step_ms(decodes, piece) / piece / token_ms

    def _step_ms(self, decodes: StepShape, tokens: int) -> float:
        return self._model.estimate(decodes.with_piece(0, tokens)) + self._model.overhead_ms


def _will_decode(req: Req) -> bool:
    """Return whether the request goes on to decode here and has no output yet."""
    return req.route is Route.LOCAL and not req.output_len and req.max_new_tokens > 1
