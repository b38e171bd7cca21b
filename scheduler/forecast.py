"""How long a prompt would take here: what a decode asks its prefill and itself to choose between the two."""

from __future__ import annotations

import itertools

from .cost_model import CostModel
from .kv_memory import KVMemory
from .planner import StepPlanner
from .req import Req, ReqState
from .step_budget import LEAST_PIECE, PATIENCE

MOST_AHEAD = 256
"""So many that wait are counted; the others are taken to be like them."""


class PromptForecast:
    """Foresees by the plan of the steps (``planner.py``) and their cost, as they would be if nobody else came."""

    def __init__(self, planner: StepPlanner, memory: KVMemory, model: CostModel) -> None:
        self._planner = planner
        self._memory = memory
        self._model = model

    def ms(self, req: Req, expected: int = 0) -> float:
        """From now to the request's first token, if its prompt is computed here, behind those that came before it, and
        ``expected`` tokens that may come yet.
        """
        begun = req.hold is not None and req.state is ReqState.PREFILLING
        start = req.computed if begun else self._memory.prefix_len(req)
        return self._steps_ms(expected + self._ahead_of(req) + req.known_len - start, start)

    def uncached(self, req: Req) -> int:
        """Tokens of its prompt that would have to be computed here."""
        return req.prompt_len - self._memory.prefix_len(req)

    def _ahead_of(self, req: Req) -> int:
        """Tokens to be computed before its own."""
        planner = self._planner
        begun = sum(r.remaining for r in planner.running.values() if r.state is ReqState.PREFILLING and r is not req)
        others = [r for r in itertools.islice(planner.waiting.values(), MOST_AHEAD) if r.times.turn < req.times.turn]
        waiting = sum(r.known_len for r in others if r is not req)
        return begun + waiting * max(len(planner.waiting), MOST_AHEAD) // MOST_AHEAD

    def _steps_ms(self, tokens: int, start: int) -> float:
        """``tokens`` of prompts, in the pieces that there is room for beside the requests that decode now."""
        if tokens <= 0:
            return 0.0
        planner = self._planner
        decodes = planner.decodes_now()
        room = planner.budget.room(decodes, awaited=bool(planner.arriving))
        piece = planner.budget.fitting(room, decodes, start, tokens)
        patience = 1
        if piece <= 0:
            piece, patience = LEAST_PIECE, PATIENCE
        middle = start + max(0, tokens - piece) // 2
        step = self._model.estimate(decodes.with_piece(middle, piece)) + self._model.overhead_ms
        others = (patience - 1) * (self._model.estimate(decodes) + self._model.overhead_ms)
        return tokens / piece * (step + others)
