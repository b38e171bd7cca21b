"""Shortest remaining prefill first, with aging: srpf."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

import numpy as np

from ..estimates.cost_model import CostModel, StepShape
from ..kv_memory import KVMemory
from ..req import Req, ReqState
from .base import PolicyNeeds
from .by_prefix import F64, ByRank, Ranker
from .prefix_index import Slots

PATIENCE = 12.0
"""Factor on a prompt's own time that is added to its arrival."""
PIECE = 256
"""Tokens of the piece by which the time of a prompt is estimated."""


class ShortestRemainingFirst(ByRank):
    """Order by *due time*: arrival, plus ``PATIENCE`` times what the rest of the prompt takes by itself.

    Without load that is shortest first. A prompt of 30 ms does not queue behind one of 3 s, and goes between its pieces
    if it has begun. No prompt starves: one that arrives later by more than ``PATIENCE`` times an earlier prompt's own
    time never goes before that one, however short. So only prompts that arrive within 36 s can go before a prompt of 3
    s. A rule by length alone has no such bound. (Due times replace a bonus for waiting, because two waiting requests
    age alike: their order stays, and is found without looking at the clock.)
    """

    may_pass = True

    def __init__(self, memory: KVMemory, model: CostModel) -> None:
        super().__init__(memory)
        self._model = model

    @classmethod
    def make(cls, needs: PolicyNeeds) -> Self:
        return cls(needs.memory, needs.model)

    def ranker(self) -> Ranker:
        index = self.index
        per_token, per_pair = self._rates()

        def due(slots: Slots) -> F64:
            matched, length = index.matched[slots], index.length[slots]
            length = np.maximum(length, matched)
            pairs = (length * length - matched * matched) / 2
            times: F64 = index.fcfs_time[slots] + per_token * (length - matched) + per_pair * pairs
            return times

        return due

    def begun(self, reqs: list[Req]) -> list[Req]:
        return sorted(reqs, key=self._due_begun)

    def is_before(self, waiting: Req, begun: Req) -> bool:
        if waiting.retractions:
            return not begun.retractions
        due = self.due(waiting, waiting.known_len, self.index.matched_of(waiting))
        return due < self._due_begun(begun)

    def due(self, req: Req, length: int, computed: int) -> float:
        """Return the due time, in seconds of ``time.monotonic()``, by which the request is sorted.

        ``computed`` of its first ``length`` tokens need no computation.
        """
        per_token, per_pair = self._rates()
        pairs = (length * length - computed * computed) / 2
        return req.times.fcfs_time + per_token * (length - computed) + per_pair * pairs

    def ahead_of(self, req: Req, uncached: int, others: Iterable[Req]) -> list[Req]:
        per_token, per_pair = self._rates()

        def due(one: Req, left: int) -> float:
            computed = one.known_len - left
            return one.times.fcfs_time + per_token * left + per_pair * (one.known_len**2 - computed**2) / 2

        mine = due(req, uncached)
        return [r for r in others if due(r, left_of(r)) < mine]

    def _due_begun(self, req: Req) -> float:
        # A retracted request has waited before; it goes first, as it does among the waiting ones.
        return self.due(req, req.total_len, req.computed) if not req.retractions else -np.inf

    def _rates(self) -> tuple[float, float]:
        """Return by how many seconds a token, and an attention pair, moves a due time."""
        model = self._model
        token_ms = (model.estimate(StepShape(prompt_tokens=PIECE)) + model.overhead_ms) / PIECE
        pair_ms = model.estimate(StepShape(prompt_pairs=1e6)) - model.estimate(StepShape())
        return PATIENCE * token_ms / 1e3, PATIENCE * pair_ms / 1e6 / 1e3


def left_of(req: Req) -> int:
    """Return how many tokens of its prompt (after a retraction, also of its output) the request still has to compute.

    For a waiting request it is an estimate.
    """
    return req.to_compute if req.state is ReqState.PREFILLING else req.uncached or req.known_len
