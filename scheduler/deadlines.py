"""When requests have to be over: ``timeout_s`` of their clients, counted from when they came."""

from __future__ import annotations

import heapq
import math

from .req import Req, Route

SENDERS_GRACE = 1.0
"""Seconds. Of a request that is handed over the instance that answers the client says when its time is over, and calls
its sender off; a sender that hears nothing of it ends it a little later."""
FEW = 64
"""Ended requests, with all their tokens, that may be kept beside as many as live."""


class Deadlines:
    """Of those that live and have one. Requests that ended are dropped when their time comes, or are too many."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Req]] = []
        self._count = 0
        self._sweep_above = FEW
        self.expired = 0
        """Since the start."""

    def add(self, req: Req) -> None:
        """The request has come; nothing to do where its client waits as long as it takes."""
        if not req.msg.timeout_s:
            return
        self._count += 1
        grace = SENDERS_GRACE if req.route is Route.OUTGOING else 0.0
        heapq.heappush(self._heap, (req.times.arrival + req.msg.timeout_s + grace, self._count, req))
        if len(self._heap) > self._sweep_above:
            self._heap = [entry for entry in self._heap if not entry[2].is_ended]
            heapq.heapify(self._heap)
            self._sweep_above = 2 * len(self._heap) + FEW

    def pop(self, now: float) -> list[Req]:
        """Those whose time is over."""
        late: list[Req] = []
        while self._heap and (self._heap[0][0] <= now or self._heap[0][2].is_ended):
            req = heapq.heappop(self._heap)[2]
            if not req.is_ended:
                late.append(req)
        self.expired += len(late)
        return late

    def seconds_left(self, now: float) -> float:
        """Until the next one's time is over, infinite where there is none; an ended one's may be told."""
        return max(0.0, self._heap[0][0] - now) if self._heap else math.inf
