"""How much memory to keep back for the tokens that running requests have yet to write.

Keeping back everything a request *may* write wastes the pool, as most stop early; keeping back nothing makes requests
retract each other. So a share ``ratio`` of it is kept (SGLang's new-token ratio): it sinks with every step that went
well and jumps up when a request had to be retracted.
"""

from __future__ import annotations

from collections.abc import Iterable

from .req import Req

INITIAL_RATIO = 0.7
MIN_RATIO = 0.1
DECAY_STEPS = 600
AFTER_RETRACTION = 0.2
CLIP_TOKENS = 4096
"""A request counts with at most this many future tokens: clients that ask for the maximum rarely use it."""


class TokenReserve:
    """The adaptive reserve. ``conservativeness`` scales it (``--schedule-conservativeness``)."""

    def __init__(self, conservativeness: float) -> None:
        self._initial = min(1.0, INITIAL_RATIO * conservativeness)
        self._floor = min(self._initial, MIN_RATIO * conservativeness)
        self.ratio = self._initial

    def step_done(self) -> None:
        """A step ran without retraction."""
        self.ratio = max(self._floor, self.ratio - (self._initial - self._floor) / DECAY_STEPS)

    def retracted(self) -> None:
        """A request had to be retracted."""
        self.ratio = min(1.0, self.ratio + AFTER_RETRACTION)

    def tokens(self, reqs: Iterable[Req]) -> int:
        """Slots to keep back for the future output of ``reqs``."""
        future = sum(min(r.max_new_tokens - (r.total_len - r.prompt_len), CLIP_TOKENS) for r in reqs)
        return int(future * self.ratio)
