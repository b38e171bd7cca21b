"""Keeps requests out of the queue's order while a store is about to bring KV of theirs.

Thousands may wait for a slow store at the same time. Each order would draw all of them in vain, several times a plan.
So a request is parked when it is first drawn, and given back when its fetch has ended or its patience is over. Its
tenant counts as waiting all the time.
"""

from __future__ import annotations

import heapq
import itertools

from .req import Req, Route
from .store_link import Store
from .waiting import WaitingQueue


class StoreWaits:
    """Owner of the requests that are parked for a store."""

    def __init__(self, waiting: WaitingQueue, store: Store) -> None:
        self._waiting = waiting
        self._store = store
        self._parked: dict[str, Req] = {}
        """Parked requests by rid. Some may have left the queue since."""
        self._ends: list[tuple[float, int, Req]] = []
        """Heap: until when a request waits, a number that differs, and the request."""
        self._numbers = itertools.count()
        store.fetch_watchers.append(self._fetched)

    def holds(self, req: Req, now: float) -> bool:
        """Return whether a request, which was just drawn, has to wait for a store. Park it if so."""
        until = self._store.waits_until(req.rid)
        if now >= until:
            return False
        # Claims of incoming requests are parked by other rules (``optional_claims.py``), and get their memory first.
        if req.route is not Route.INCOMING:
            self._parked[req.rid] = req
            heapq.heappush(self._ends, (until, next(self._numbers), req))
            self._waiting.set_aside(req)
        return True

    def end(self, now: float) -> None:
        """Give back the requests with an exceeded patience. No order may be under way, except at the same ``now``.

        One that has to wait for another fetch by now is parked again when it is drawn.
        """
        while self._ends and self._ends[0][0] <= now:
            req = heapq.heappop(self._ends)[2]
            if self._parked.get(req.rid) is req:
                self._give_back(req)

    def _fetched(self, rid: str) -> None:
        if (req := self._parked.get(rid)) is not None:
            self._give_back(req)

    def _give_back(self, req: Req) -> None:
        del self._parked[req.rid]
        self._waiting.give_back(req)
