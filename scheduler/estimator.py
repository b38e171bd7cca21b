"""What the scheduler expects of the future, from one cost model of steps that is learned while serving.

It answers three questions:

- ``first_token_ms``: when will a request have its first token?
- ``pace``: how long will the gaps between tokens be?
- ``queue_seconds``: when will a part of the queue have been served?

The placement of prompts, the wait for a store, routers and ``Retry-After`` all ask here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..messages.control import Pace
from ..messages.worker import StepResult
from .estimates.cost_model import CostModel
from .estimates.queue_rate import QueueRate
from .first_token import NOTHING, FirstTokenForecast, Load
from .itl_budget import ItlBudget
from .kv_memory import KVMemory
from .pace import PaceMeter
from .planner import StepPlanner
from .req import Req
from .step_builder import InFlightStep


class Estimator:
    """Owner of the cost model and of what its estimates are corrected by.

    ``reqs``: all live requests. ``in_flight``: steps that the worker has. ``longest`` returns the maximum tokens of a
    request, which a resize of the pool changes.
    """

    def __init__(
        self,
        model: CostModel,
        planner: StepPlanner,
        memory: KVMemory,
        reqs: Mapping[str, Req],
        in_flight: Sequence[InFlightStep],
        longest: Callable[[], int],
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
        """Return the milliseconds from ``now`` to the request's first token, if its prompt is computed on this
        instance.

        ``uncached``: tokens of the prompt to compute. Earlier requests go before it, and so does the work ``expected``,
        which may still come.
        """
        return self._first_token.ms(req, uncached, now, expected)

    def pace(self, now: float) -> Pace:
        """Return the time from token to token that one more request would see."""
        return self._pace.pace(now)

    def queue_seconds(self, waiting: int, now: float) -> float:
        """Return the seconds until ``waiting`` requests are admitted.

        That is what the prompts take, or the latest rate of admissions (which memory and rows determine as well),
        whichever is longer. The time of the prompts is added up once for each ``now``. Thousands of requests may be
        refused in one tick, each with this number.
        """
        if now != self._prompts_at:
            self._prompts_at, self._prompts_seconds = now, self._pace.waiting_seconds()
        return max(self._prompts_seconds, self._queue.seconds(waiting))

    def relax_budget(self, now: float) -> None:
        """Let steps take longer if waiting requests would miss ``--ttft-target-ms``, and shorter again if not.

        Do nothing without an ITL budget and a TTFT target.
        """
        itl = self._planner.budget.itl
        if itl is not None and itl.ttft_target_ms:
            itl.relax(self._first_token.longest_ms(now))

    # --- parts of them ---

    def compute_ms(self, req: Req, tokens: int) -> float:
        """Return the milliseconds to compute ``tokens`` tokens of the request's prompt here.

        They share their steps with the requests that decode now, and with no other prompt.
        """
        return self._first_token.compute_ms(req, tokens)

    def uncached(self, req: Req) -> int:
        """Return how many tokens of its prompt would have to be computed here, if no KV comes from a store.

        What the pool and host memory have is deducted.
        """
        return self._first_token.uncached(req)

    # --- what is learned ---

    def turns_came(self, count: int, now: float) -> None:
        """Note that ``count`` requests, perhaps 0, were admitted since the last call. Call this after each plan."""
        self._queue.came(count, now, waited=len(self._planner.waiting) > 0)

    def step_done(self, step: InFlightStep, result: StepResult, now: float) -> None:
        """Learn from a step with its result, which came at ``now``: its time, the overhead around it and the gap that
        streams saw.
        """
        shape, estimate_ms, promise, copy_ms = step.step_estimate
        # Time that its readers waited: since the result before it, or since it was sent to an idle worker.
        gap_ms = (now - max(step.sent_at, self._last_result_at)) * 1000
        self._last_result_at = now
        # Logits of prompt tokens, wanted for their logprobs, cost time that the shape does not show.
        if not step.input_logprobs:
            self.model.learn(shape, result.forward_ms, estimate_ms)
            self.model.learn_overhead(max(0.0, gap_ms - result.forward_ms - copy_ms))
        itl: ItlBudget | None = self._planner.budget.itl
        if promise is not None and itl is not None:
            itl.learn(promise, gap_ms)
        self._pace.step_done(step.step_estimate, result.forward_ms, now)

    def catch_up(self) -> None:
        """Do the learning that can wait until the messages of this tick are sent."""
        self.model.catch_up()
