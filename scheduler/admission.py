"""How much memory to keep back for the tokens that requests have yet to write, when another one wants some.

Keeping back everything that they *may* write wastes the pool, as most stop early; keeping back nothing makes them
retract each other. So their use of pages is simulated ahead (``page_forecast.py``) by output lengths that are learned
(``output_lengths.py``), and a request is admitted where the use never exceeds the pool, as far as one can tell.
"""

from __future__ import annotations

from collections.abc import Iterable

from .kv_memory import KVMemory
from .output_lengths import OutputLengths
from .page_forecast import Held, extra_slots, moments
from .req import Req, ReqState, Route

SPREAD = 1.0
"""Standard deviations of the use that are kept beside its mean: what waits for more room than that waits longer than
the few that are retracted lose (docs/scheduling.md)."""


class Admission:
    """Says what to keep back. ``conservativeness`` scales it (``--schedule-conservativeness``)."""

    def __init__(self, memory: KVMemory, conservativeness: float) -> None:
        self.lengths = OutputLengths()
        self._memory = memory
        self._factor = conservativeness

    def reserve(self, reqs: Iterable[Req], newcomer: Req) -> int:
        """Slots that ``reqs``, who have memory, and ``newcomer``, who wants some for what it has to compute, will need
        beyond that, here.
        """
        generating = [req for req in (*reqs, newcomer) if req.route is not Route.OUTGOING and req.wants_tokens]
        if not generating:
            return 0
        held = [self._held(req) for req in generating]
        up = self._memory.pages_up
        worst = sum(up(one.length + one.most) - up(one.length) for one in held)
        if worst * self._factor + up(newcomer.known_len) <= self._memory.obtainable:
            return 0  # everybody can have all that he may ask for: nothing need be foreseen
        ahead = moments(max(one.most for one in held))
        most = [req.max_new_tokens for req in generating]
        have = [req.total_len - req.prompt_len for req in generating]
        alive = self.lengths.survival(most, have, ahead)
        return int(extra_slots(held, alive, ahead, self._memory.page_size, SPREAD) * self._factor)

    def learn(self, req: Req) -> None:
        """The request has ended by itself, here."""
        if req.state is ReqState.FINISHED and req.route is not Route.OUTGOING and req.output_len:
            self.lengths.learn(req.max_new_tokens, req.output_len)

    def _held(self, req: Req) -> Held:
        length = max(req.total_len, req.prompt_len)
        # What it began with may be others' as well, and stays.
        own = self._memory.pages_up(length) - req.reused
        return Held(length, max(0, own), req.max_new_tokens - (req.total_len - req.prompt_len))
