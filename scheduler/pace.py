"""How fast one more request would decode here: what a router compares instances by."""

from __future__ import annotations

import math

from ..messages.control import Pace
from .cost_model import CostModel
from .planner import StepPlanner
from .step_builder import Foresight
from .step_shape import StepShape

MEMORY_SECONDS = 10.0
"""Prompts come in bursts: over so long their share of the time is averaged."""
MOST_SHARE = 0.9
MORE = 8
"""So many more requests at once show what each costs."""


class PaceMeter:
    """Watches which share of the time goes into prompts, and foresees the steps of what decodes here."""

    def __init__(self, planner: StepPlanner, model: CostModel) -> None:
        self._planner = planner
        self._model = model
        self._share = 0.0
        self._at = 0.0

    def step_done(self, foresight: Foresight, forward_ms: float, now: float) -> None:
        """A step took ``forward_ms``; what its decodes alone would have taken is no prompt's time."""
        shape = foresight.shape
        if not shape.prompt_tokens:
            return
        alone_ms = self._model.estimate(shape.decodes_alone) if shape.decodes else 0.0
        self._share = self._share_at(now) + max(0.0, forward_ms - alone_ms) / 1000 / MEMORY_SECONDS
        self._at = now

    def pace(self, now: float) -> Pace:
        """As of ``now``, if prompts go on to come as they did."""
        decodes, streams = self._planner.decodes_now(), self._planner.streams()
        context = decodes.kv_tokens / decodes.decodes if decodes.decodes else 0.0

        def token_ms(count: int) -> float:
            shape = StepShape(count, int(count * context))
            return (self._model.estimate(shape) + self._model.overhead_ms) / (1 - min(self._share_at(now), MOST_SHARE))

        first = token_ms(streams + 1)
        slope, itl = (token_ms(streams + 1 + MORE) - first) / MORE, self._planner.budget.itl
        return Pace(round(first, 3), round(slope, 4), itl.budget_ms if itl is not None else 0.0)

    def _share_at(self, now: float) -> float:
        return self._share * math.exp((self._at - now) / MEMORY_SECONDS)
