"""Admission by a ratio, as in SGLang and earlier in this server, to compare the forecast with.

A share of the tokens that running requests may still generate is reserved. The share sinks with every step that went
well, and jumps up when a request had to be retracted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...scheduler.admission import NONE_BEFORE, Admission
from ...scheduler.kv_memory import KVMemory
from ...scheduler.req import Req

INITIAL, FLOOR, DECAY_STEPS, AFTER_RETRACTION, CLIP_TOKENS = 0.7, 0.1, 600, 0.2, 4096


class RatioAdmission(Admission):
    """Told of each step's end by ``step_done``."""

    def __init__(self, memory: KVMemory, conservativeness: float) -> None:
        super().__init__(memory, conservativeness)
        self._initial = min(1.0, INITIAL * conservativeness)
        self._floor = min(self._initial, FLOOR * conservativeness)
        self._ratio = self._initial

    def reserve(
        self, reqs: Iterable[Req], newcomer: Req, before: Mapping[Req, int] = NONE_BEFORE, *, given: int = 0
    ) -> int:
        """Return the slots to reserve: a share of the output tokens that these requests may still generate.

        At most ``CLIP_TOKENS`` count for each request. A request counts once, even if it is given twice. What else is
        obtainable (``given``) does not matter.
        """
        asked = dict.fromkeys((*reqs, *before, newcomer))
        future = sum(min(r.max_new_tokens - (r.total_len - r.prompt_len), CLIP_TOKENS) for r in asked)
        return int(future * self._ratio)

    def step_done(self, retracted: int) -> None:
        """Lower the reserved share a little after a planned step, and raise it for each request that was retracted.

        ``retracted``: number of these requests.
        """
        self._ratio = max(self._floor, self._ratio - (self._initial - self._floor) / DECAY_STEPS)
        self._ratio = min(1.0, self._ratio + AFTER_RETRACTION * retracted)
