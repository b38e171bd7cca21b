"""How much memory to reserve for tokens that admitted requests will still generate, when another request wants some.

Reserving everything that they *may* generate wastes the pool, as most stop early. Reserving nothing makes them retract
each other. So their use of pages is simulated ahead (``estimates/page_forecast.py``) with learned output lengths
(``output_lengths.py``). A request is admitted if the estimated use never exceeds the pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from .estimates.output_lengths import OutputLengths
from .estimates.page_forecast import Held, extra_slots, moments
from .kv_memory import KVMemory
from .req import Req, ReqState, Route

NONE_BEFORE: Mapping[Req, int] = MappingProxyType({})
"""No request that will get memory before another one."""
SPREAD = 1.0
"""Standard deviations of the use that are reserved beside its mean.

With more, waiting requests would lose more time than the few retracted ones do (docs/scheduling.md).
"""


class Admission:
    """Decides how much to reserve. ``conservativeness`` scales it (``--schedule-conservativeness``)."""

    def __init__(self, memory: KVMemory, conservativeness: float) -> None:
        self.lengths = OutputLengths()
        self._memory = memory
        self._factor = conservativeness

    def reserve(
        self, reqs: Iterable[Req], newcomer: Req, before: Mapping[Req, int] = NONE_BEFORE, *, given: int = 0
    ) -> int:
        """Estimate the KV slots to keep free for tokens that all these requests will still generate on this instance.

        Return 0 if each of them can have its maximum. ``reqs`` have memory already, and ``newcomer`` asks for some.
        ``before``: requests that will get memory before it, with the tokens of a prefix that takes none. Their prompts
        are not in the estimate. ``given``: slots that count as obtainable besides.
        """
        asked = (*reqs, *before, newcomer)
        generating = [req for req in asked if req.route is not Route.OUTGOING and req.wants_tokens]
        if not generating:
            return 0
        held = [self._held(req, before.get(req, 0)) for req in generating]
        up = self._memory.pool.pages_up
        worst = sum(up(one.length + one.most) - up(one.length) for one in held)
        prompts = sum(up(req.known_len) for req in (*before, newcomer)) - sum(before.values())
        if worst * self._factor + prompts <= self._memory.pool.obtainable + given:
            return 0  # all of them can have all that they may ask for: no estimate is needed
        ahead = moments(max(one.most for one in held))
        most = [req.max_new_tokens for req in generating]
        have = [req.total_len - req.prompt_len for req in generating]
        alive = self.lengths.survival(most, have, ahead)
        return int(extra_slots(held, alive, ahead, self._memory.pool.page_size, SPREAD) * self._factor)

    def learn(self, req: Req) -> None:
        """Learn from the output length of ``req``, which has ended.

        It is ignored if it was aborted, failed, was decoded by another instance or has no output.
        """
        if req.state is ReqState.FINISHED and req.route is not Route.OUTGOING and req.output_len:
            self.lengths.learn(req.max_new_tokens, req.output_len)

    def _held(self, req: Req, shared: int) -> Held:
        length = max(req.total_len, req.prompt_len)
        # The cached prefix that it began with, or will begin with, may be shared with others, and stays.
        own = self._memory.pool.pages_up(length) - req.reused - shared
        return Held(length, max(0, own), req.max_new_tokens - (req.total_len - req.prompt_len))
