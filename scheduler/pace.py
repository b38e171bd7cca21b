"""Estimates the time per output token that one more request would get here. Routers compare instances by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from ..messages.control import Pace
from .estimates.cost_model import CostModel, StepShape
from .planner import StepPlanner
from .req import Req, Route
from .step_builder import StepEstimate

MEMORY_SECONDS = 10.0
"""Time constant of the average share of time that prompts take, as prompts come in bursts."""
MOST_SHARE = 0.9
MORE = 8
"""Number of additional requests. Their estimated cost is divided to get that of one."""
PIECE = 256
"""Length of the pieces in which the time of waiting prompts is estimated, in tokens."""


class PaceMeter:
    """Measures the share of time that prompts take, and estimates the decode steps.

    ``reqs``: all live requests. ``longest`` returns the maximum length of a request in tokens, which a resize changes.
    """

    def __init__(
        self, planner: StepPlanner, model: CostModel, reqs: Mapping[str, Req], longest: Callable[[], int]
    ) -> None:
        self._planner = planner
        self._model = model
        self._reqs = reqs
        self._longest = longest
        self._share = 0.0
        self._at = 0.0

    def step_done(self, step_estimate: StepEstimate, forward_ms: float, now: float) -> None:
        """Learn the share of time that prompts take from a step with prompts, which took ``forward_ms``.

        All beyond the estimated time of its decodes alone counts as theirs.
        """
        shape = step_estimate.shape
        if not shape.prompt_tokens:
            return
        alone_ms = self._model.estimate(shape.decodes_alone) if shape.decodes else 0.0
        of_prompts = max(0.0, 1 - alone_ms / max(forward_ms, 1e-3))
        kept = math.exp(-forward_ms / 1000 / MEMORY_SECONDS)
        self._share = self._share_at(now - forward_ms / 1000) * kept + (1 - kept) * of_prompts
        self._at = now

    def pace(self, now: float) -> Pace:
        """Return the time per output token that one more request would get here, as of ``now``.

        Prompts are assumed to come as before, and the waiting ones to be computed.
        """
        decodes, itl = self._planner.decodes_now(), self._planner.budget.itl
        streams = sum(req.route is not Route.OUTGOING for req in self._reqs.values())
        context = decodes.kv_tokens / decodes.decodes if decodes.decodes else 0.0
        share = min(self._share_at(now) + self.waiting_seconds() / MEMORY_SECONDS, MOST_SHARE)

        def decode_ms(count: int) -> float:
            return self._model.estimate(StepShape(count, int(count * context))) + self._model.overhead_ms

        alone = StepShape(streams + 1, int((streams + 1) * context))
        decode, more = decode_ms(streams + 1), decode_ms(streams + 1 + MORE)
        token = decode / (1 - share)
        if itl is not None:  # prompts leave room for streams
            token = min(token, itl.limit_ms(alone))
        return Pace(
            token_ms=round(token, 3),
            decode_ms=round(decode, 3),
            stream_ms=round(max(0.0, more - decode) / MORE, 4),
            budget_ms=itl.budget_ms if itl is not None else 0.0,
            max_tokens=self._longest(),
        )

    def waiting_seconds(self) -> float:
        """Return the seconds to compute the prompt tokens of running and waiting requests, those for peers included."""
        tokens = sum(r.to_compute for r in self._planner.running.values() if r.remaining > 1)
        tokens += sum(r.uncached or r.known_len for r in self._planner.waiting.computing())
        return tokens / PIECE * self._model.estimate(StepShape().with_piece(0, PIECE)) / 1000

    def _share_at(self, now: float) -> float:
        return self._share * math.exp(min(0.0, self._at - now) / MEMORY_SECONDS)
