"""Requests that lack memory which no computing request will free, because hand-overs hold it.

A decoding request that lacks a slot has others retracted (``retraction.py``). If none can be, it is *starved*: the next
page that comes free is for it, and reservations are asked back for it (``claims.py``). A request is *stuck* while
besides nothing at all is computed, whether it decodes or waits. Hand-overs end by themselves and return their memory,
except those with a writer that does not stop. So the scheduler limits how long a request may be stuck.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .claims import Claims
from .kv_memory import KVMemory
from .req import Req, ReqState, Route
from .waiting import WaitingQueue


class Stuck(NamedTuple):
    """A request that waits for memory held by no computing request. ``since``: ``time.monotonic()``."""

    req: Req
    since: float


class MemoryShortage:
    """Notes after each plan which request is starved or stuck; see the module."""

    def __init__(self, waiting: WaitingQueue, running: Mapping[str, Req], claims: Claims, memory: KVMemory) -> None:
        self._waiting = waiting
        self._running = running
        self._claims = claims
        self._memory = memory
        self.stuck: Stuck | None = None
        """The request that cannot continue although no other request computes."""
        self._short: Req | None = None
        """The first decoding request in order, if no other can be retracted for the slot that it lacks."""

    def begin_plan(self) -> None:
        """Forget the request that lacked a slot in the plan before."""
        self._short = None

    def lacks_slot(self, req: Req) -> None:
        """Note that a decoding request lacks a slot in this plan, and that no other one can be retracted for it."""
        self._short = req

    def planned(self, now: float, *, nothing: bool) -> None:
        """Note which request lacks memory that only hand-overs can hold, if one does.

        Such a request is the first that decodes, or the first that waits while none runs. ``nothing``: whether the
        planned step is empty. A decoding request gets the next page that comes free, also while prompts are computed.
        """
        first = starved = None
        if nothing and not self._running:
            first = next(self._claims.eligible(now, computing_only=True), None)
        elif nothing:
            lacking = (r for r in self._running.values() if r.state is ReqState.RUNNING and r.wants_tokens)
            first = starved = min((r for r in lacking if not r.pending), key=self._waiting.precedence, default=None)
        elif self._short is not None and not self._short.pending:
            starved = self._short
        self._claims.starved = starved
        if first is None:
            self.stuck = None
        elif self.stuck is None or self.stuck.req is not first:
            self.stuck = Stuck(first, now)

    def lacks_memory(self, now: float) -> bool:
        """Return whether a decoding request lacks a slot, or the first claim can't have the memory that it waits for.

        A claim counts as well if the transfer limit holds it up because others keep window pages.
        """
        if self._claims.starved is not None:
            return True
        headroom = self._memory.headroom
        for req in (next(self._claims.eligible(now), None), self._claims.first(now)):
            if req is None:
                continue
            if req.route is Route.INCOMING and not headroom.could_promise_one_more(req):
                return True
            if not headroom.could_admit(req, self._claims.reserve(req)):
                return True
        return False
