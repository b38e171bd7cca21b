"""What the scheduler expects of the future, from one cost model of steps that is learned while serving.

It answers three questions: when a request will have its first token (``first_token_ms``), how long the gaps between
tokens will be (``pace``), and when a part of the queue will have been served (``queue_seconds``). Whoever has to know
one of them asks here: the choice between prefill and decode, the wait for a store, routers, ``Retry-After``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...messages.control import Pace
from ...messages.worker import StepResult
from ..itl_budget import ItlBudget
from ..kv_memory import KVMemory
from ..planner import StepPlanner
from ..req import Req
from ..step_builder import InFlightStep
from .cost_model import CostModel
from .first_token import NOTHING, FirstTokenForecast, Load
from .pace import PaceMeter
from .queue_rate import QueueRate


class Estimator:
    """Owner of the cost model and of what its estimates are corrected by.

    ``reqs``: all requests that live; ``in_flight``: steps that the worker has; ``longest``: tokens that a request may
    come to.
    """

    def __init__(
        self,
        model: CostModel,
        planner: StepPlanner,
        memory: KVMemory,
        reqs: Mapping[str, Req],
        in_flight: Sequence[InFlightStep],
        longest: int,
    ) -> None:
        self.model = model
        self._planner = planner
        self._first_token = FirstTokenForecast(planner, memory, model, in_flight)
        self._pace = PaceMeter(planner, model, reqs, longest)
        self._queue = QueueRate()
        self._last_result_at = 0.0
        self._prompts_at = -1.0
        self._prompts_seconds = 0.0

    # --- the three questions ---

    def first_token_ms(self, req: Req, uncached: int, now: float, expected: Load = NOTHING) -> float:
        """From ``now`` to the request's first token, if its prompt is computed here, ``uncached`` tokens of it, behind
        those that came before it, and those ``expected`` that may come yet.
        """
        return self._first_token.ms(req, uncached, now, expected)

    def pace(self, now: float) -> Pace:
        """How long one more request would wait from token to token."""
        return self._pace.pace(now)

    def queue_seconds(self, waiting: int, now: float) -> float:
        """Until so many that wait have had their turn: as their prompts take, or as turns have come lately (which
        memory and rows decide as well), whichever is longer.

        What the prompts take is added up once for each ``now``: thousands of requests may be refused in one turn of the
        loop, each of them told this.
        """
        if now != self._prompts_at:
            self._prompts_at, self._prompts_seconds = now, self._pace.waiting_seconds()
        return max(self._prompts_seconds, self._queue.seconds(waiting))

    def relax_budget(self, now: float) -> None:
        """Raise or lower the limit of steps by how long requests wait for their first tokens (``--ttft-target-ms``)."""
        itl = self._planner.budget.itl
        if itl is not None and itl.ttft_target_ms:
            itl.relax(self._first_token.longest_ms(now))

    # --- parts of them ---

    def compute_ms(self, req: Req, tokens: int) -> float:
        """How long computing so many tokens of the request's prompt would take here, behind nobody else's."""
        return self._first_token.compute_ms(req, tokens)

    def uncached(self, req: Req) -> int:
        """Tokens of its prompt that would have to be computed here, where a store gives none."""
        return self._first_token.uncached(req)

    # --- what is learned ---

    def turns_came(self, count: int, now: float) -> None:
        """Note that ``count`` requests were admitted since the last call."""
        self._queue.came(count, now, waited=len(self._planner.waiting) > 0)

    def step_done(self, step: InFlightStep, result: StepResult, now: float) -> None:
        """Hold the outcome of a step against what was expected of it."""
        shape, estimate_ms, promise, copy_ms = step.foresight
        # What its readers waited: since the result before it, or since it was sent to a worker that had nothing to do.
        gap_ms = (now - max(step.sent_at, self._last_result_at)) * 1000
        self._last_result_at = now
        # The logits of prompt tokens, wanted for their logprobs, cost time of which the shape says nothing.
        if not step.input_logprobs:
            self.model.learn(shape, result.forward_ms, estimate_ms)
            self.model.learn_overhead(max(0.0, gap_ms - result.forward_ms - copy_ms))
        itl: ItlBudget | None = self._planner.budget.itl
        if promise is not None and itl is not None:
            itl.learn(promise, gap_ms)
        self._pace.step_done(step.foresight, result.forward_ms, now)

    def catch_up(self) -> None:
        """Do the learning that can wait until the messages of this turn are sent."""
        self.model.catch_up()
