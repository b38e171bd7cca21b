"""Estimates the time to the first token of a request, if its prompt is computed on this instance.

A decode asks its prefill and itself, and chooses the sooner of the two.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from .estimates.cost_model import CostModel, StepShape
from .kv_memory import KVMemory
from .planner import StepPlanner
from .policies.by_remaining import left_of
from .req import Req, ReqState
from .step_budget import LEAST_PIECE, PATIENCE
from .step_builder import InFlightStep

MOST_AHEAD = 256
"""Maximum number of waiting requests that an estimate looks at, evenly spread over the queue.

Others count as the ones looked at do.
"""
LOOK_SECONDS = 0.1
"""Time between two looks for the next waiting prompt. The order of many costs more than a small step's plan."""


@dataclass(frozen=True, slots=True)
class Load:
    """An amount of work: a number of prompts and of their tokens that are not computed yet."""

    prompts: int = 0
    tokens: int = 0

    def __add__(self, other: Load) -> Load:
        return Load(self.prompts + other.prompts, self.tokens + other.tokens)

    def __sub__(self, other: Load) -> Load:
        return Load(self.prompts - other.prompts, self.tokens - other.tokens)


NOTHING = Load()


class FirstTokenForecast:
    """Estimates from the planner's rules and the cost of steps, as if no other request came."""

    def __init__(
        self, planner: StepPlanner, memory: KVMemory, model: CostModel, in_flight: Sequence[InFlightStep]
    ) -> None:
        self._planner = planner
        self._memory = memory
        self._model = model
        self._in_flight = in_flight
        self._looked_at = -math.inf
        self._first: Req | None = None

    def ms(self, req: Req, uncached: int, now: float, expected: Load = NOTHING) -> float:
        """Return the milliseconds from ``now`` to the request's first token, if its prompt is computed on this
        instance.

        ``uncached``: tokens of the prompt to compute, used only if the request does not compute yet. Earlier requests
        go before it, and so does the work ``expected``, which may still come.
        """
        if req.state in (ReqState.PREFILLING, ReqState.SENDING):
            uncached = req.to_compute if req.state is ReqState.PREFILLING else 0  # what isn't left is under way
        decodes = self._planner.decodes_now()
        own = self._pieces_ms(req, uncached, req.known_len - uncached / 2, decodes)
        ahead = self._ahead_of(req, uncached) + expected
        # Each prompt starts at its own beginning: on average, a piece is half a prompt deep.
        before = self._pieces_ms(req, ahead.tokens, ahead.tokens / max(ahead.prompts, 1) / 2, decodes)
        return self._under_way_ms(now) + before + own

    def compute_ms(self, req: Req, tokens: int) -> float:
        """Return the milliseconds to compute the last ``tokens`` tokens of the request's prompt here.

        They share their steps with the requests that decode now, and with no other prompt.
        """
        return self._pieces_ms(req, tokens, req.known_len - tokens / 2, self._planner.decodes_now())

    def longest_ms(self, now: float) -> float:
        """Return the longest time to first token in milliseconds, counted from arrival, of requests that still have
        none.

        Only prompts that are being computed count, and the first waiting one in order if it fits in memory. Each is
        taken as if it were next from ``now`` on. Return 0.0 if there are none.
        """
        planner = self._planner
        decodes = planner.decodes_now()
        begun = [r for r in planner.running.values() if r.state is ReqState.PREFILLING and not r.output_len]
        longest = max((self._next_ms(req, now, decodes) for req in begun), default=0.0)
        # One that others overtake, or that lacks memory, has no sooner token if steps with prompts take longer.
        first = self._first_waiting(now)
        if first is None or (ms := self._next_ms(first, now, decodes)) <= longest:
            return longest
        return ms if self._memory.headroom.could_admit(first, planner.claims.reserve(first)) else longest

    def _first_waiting(self, now: float) -> Req | None:
        """Return the first waiting prompt in order that has no output, as it was at most ``LOOK_SECONDS`` ago."""
        planner = self._planner
        if now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            claims = planner.claims.eligible(now, computing_only=True)
            self._first = next((r for r in claims if not r.output_len), None)
        if self._first is not None and not planner.waiting.has(self._first):
            self._first = None
        return self._first

    def _next_ms(self, req: Req, now: float, decodes: StepShape) -> float:
        """Return the milliseconds from the request's arrival to its first token if it is next from ``now`` on."""
        left = left_of(req)
        return (now - req.times.arrival) * 1000 + self._pieces_ms(req, left, req.known_len - left / 2, decodes)

    def uncached(self, req: Req) -> int:
        """Return how many tokens of its prompt would have to be computed here, if no KV comes from a store.

        What the pool and host memory have is deducted.
        """
        memory = self._memory
        cached = memory.prefix_len(req)
        cached += len(memory.tiers.find(req, cached, req.longest_reusable_prefix)) * memory.pool.page_size
        return req.prompt_len - cached

    def _ahead_of(self, req: Req, uncached: int) -> Load:
        planner, queue = self._planner, self._planner.waiting
        begun = [r for r in planner.running.values() if r.state is ReqState.PREFILLING and r is not req]
        left = [r.to_compute for r in queue.ahead_of(req, uncached, begun)]
        running = Load(len(left), sum(left))
        if req.hold is not None:
            return running  # a request with memory comes before all that wait for some
        # Spread over the queue: the first ones in it may all have a low priority, or all go before this one.
        step = -(-queue.num_computing // MOST_AHEAD) or 1
        looked_at = list(itertools.islice(queue.computing(), step // 2, None, step))
        earlier = queue.ahead_of(req, uncached, (r for r in looked_at if r is not req))
        tokens = sum(r.uncached or r.known_len for r in earlier)
        others = queue.num_computing - len(looked_at)  # like these, most likely
        share = 1 + others / max(1, len(looked_at))
        return running + Load(int(len(earlier) * share), int(tokens * share))

    def _under_way_ms(self, now: float) -> float:
        """Estimate the milliseconds from ``now`` until the steps that were sent to the worker are done."""
        if not self._in_flight:
            return 0.0
        first, *others = (step.step_estimate.estimate_ms + self._model.overhead_ms for step in self._in_flight)
        elapsed = (now - self._in_flight[0].sent_at) * 1000
        # A step that is overdue may take as long again.
        return abs(first - elapsed) + sum(others)

    def _pieces_ms(self, req: Req, tokens: int, depth: float, decodes: StepShape) -> float:
        """Return the milliseconds to compute ``tokens`` prompt tokens, in the pieces that fit beside ``decodes``.

        ``depth``: their average position in the prompt. ``decodes``: the requests that decode now. 0.0 for no tokens.
        """
        if tokens <= 0:
            return 0.0
        planner, budget = self._planner, self._planner.budget
        awaited = len(planner.arriving) > (req.rid in planner.arriving)
        start = int(depth)
        patience = 1
        piece = budget.fitting(budget.allowance(decodes, awaited=awaited, refused=0), decodes, start, tokens)
        if piece <= 0:  # only every ``PATIENCE``-th step
            patience = PATIENCE
            allowance = budget.allowance(decodes, awaited=awaited, refused=PATIENCE - 1)
            piece = max(budget.fitting(allowance, decodes, start, tokens), LEAST_PIECE)
        step = self._model.estimate(decodes.with_piece(max(0, int(depth - piece / 2)), piece)) + self._model.overhead_ms
        others = (patience - 1) * (self._model.estimate(decodes) + self._model.overhead_ms)
        return tokens / piece * (step + others)
