"""Retracts running requests when memory is short: those that cost least for what they free.

A request's cost is the tokens to compute again. It frees the pages that no other request shares with it. Prefixes that
others use stay where they are, so a request that shares most of its prompt frees little, and costs little. The first
request in the order of the queue is never retracted for another one's output, so that some request always comes to its
end. Requests in the middle of their prompts are retracted as well as those that decode. Prompts of hand-overs are not:
a peer may read or write their memory.

With priorities, requests are retracted for a waiting one as well (*preemption*).

What the host tier will have of a request (``tiers.py``) need not be computed again, which makes a victim cheaper.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

from ..messages.outputs import Phase
from .claims import Claims
from .kv_memory import KVMemory
from .req import Req, ReqState, Route, hold_of
from .waiting import WaitingQueue


class Retraction:
    """Takes memory from requests that decode or compute their prompt; they wait again.

    ``threshold``: number of ranks by which a running request must be below a waiting one to be preempted for it.
    """

    def __init__(
        self,
        waiting: WaitingQueue,
        running: dict[str, Req],
        claims: Claims,
        memory: KVMemory,
        threshold: int,
    ) -> None:
        self._waiting = waiting
        self._running = running
        self._claims = claims
        self._memory = memory
        self._threshold = threshold
        self.count = 0
        self.preemptions = 0
        self.latest: list[Req] = []
        """Requests that the latest plan retracted."""

    def begin_plan(self) -> None:
        """Clear ``latest``, the requests that the plan before retracted."""
        self.latest = []

    def candidates(self, decoding: Iterable[Req]) -> list[Req]:
        """Return ``decoding``, and the requests in the middle of their prompts that can give their memory back."""
        return [*decoding, *filter(self._is_local_prompt, self._running.values())]

    def choose(self, reqs: Sequence[Req]) -> Req:
        """Return the one to retract (``choose_victim``) of ``reqs``, which have memory. Retract nothing."""
        return choose_victim(reqs, self._memory, self._waiting)

    def _is_local_prompt(self, req: Req) -> bool:
        is_prompt = req.state is ReqState.PREFILLING and req.route is Route.LOCAL
        return is_prompt and not self._memory.headroom.is_pinned(req)

    def preempt(self, now: float) -> None:
        """Retract running requests until the first waiting one fits. Do nothing if that can't be achieved.

        Only requests with a priority lower by more than the threshold are retracted.
        """
        # A request that waits for a store cannot start: the victims would get the memory back at once, and lose it
        # again.
        if (req := self._claims.first(now)) is None:
            return
        headroom, rank = self._memory.headroom, self._waiting.rank(req)
        decoding = [r for r in self._running.values() if r.state is ReqState.RUNNING and not headroom.is_pinned(r)]
        below = [r for r in self.candidates(decoding) if self._waiting.rank(r) - rank > self._threshold]
        if not below or not headroom.could_replace(below, req, self._claims.reserve(req, victims=below)):
            return
        while below and not headroom.could_admit(req, self._claims.reserve(req)):
            victim = self.choose(below)
            below.remove(victim)
            self.preemptions += 1
            self.retract(victim, now)

    def retract(self, req: Req, now: float) -> None:
        """Release a running request's memory, and queue it again as a local request.

        It keeps its output, and the logprobs of its prompt as far as steps were asked for them.
        """
        self._memory.give_way(req)
        del self._running[req.rid]
        req.state = ReqState.WAITING
        # A step under way still computes its next token: it waits once that has come.
        if not req.pending:
            req.phases.enter(Phase.QUEUE, now)
        req.route = Route.LOCAL
        req.computed = 0
        req.retractions += 1
        self.count += 1
        self._waiting.add(req)
        self.latest.append(req)


def choose_victim(reqs: Sequence[Req], memory: KVMemory, waiting: WaitingQueue) -> Req:
    """Return the request to retract among ``reqs``, which have memory.

    It is the one in the last rank with the fewest tokens to recompute per freed page; among equals, the last to arrive.
    The first by ``WaitingQueue.precedence`` is never chosen, unless it is the only one.
    """
    first = min(reqs, key=waiting.precedence)
    others = [req for req in reqs if req is not first] or [first]

    def cost(req: Req) -> tuple[int, Fraction, float, str]:
        private = memory.headroom.private_len(req)
        pages = memory.pool.pages_up(private) // memory.pool.page_size
        shared = hold_of(req).kv_len - private
        again = max(1, req.computed + 1 - max(shared, memory.headroom.kept_len(req)))
        # Retracting a request that frees nothing does not help, whatever it costs.
        return -waiting.rank(req), Fraction(again, pages) if pages else Fraction(1 << 62), -req.times.fcfs_time, req.rid

    return min(others, key=cost)
