"""Deadlines of requests: ``timeout_s`` of their clients, counted from their arrival."""

from __future__ import annotations

import heapq
import math

from .req import Req, Route

SENDERS_GRACE = 1.0
"""Seconds that the sender of a hand-over adds to the deadline.

The instance that answers the client ends the request first, and cancels its sender. A sender that hears nothing of it
ends the request a little later.
"""
FEW = 64
"""Ended requests, with all their tokens, that may be kept beyond the number of live ones."""


class Deadlines:
    """Deadlines of live requests. Ended requests are dropped when their time comes, or when they are too many."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Req]] = []
        self._count = 0
        self._sweep_above = FEW
        self.expired = 0
        """Number of requests that exceeded their deadline since the start."""

    def add(self, req: Req) -> None:
        """Add a request; does nothing if it has no timeout.

        An outgoing request's deadline is later by ``SENDERS_GRACE``.
        """
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
        """Return the live requests past their deadline, and remove them."""
        late: list[Req] = []
        while self._heap and (self._heap[0][0] <= now or self._heap[0][2].is_ended):
            req = heapq.heappop(self._heap)[2]
            if not req.is_ended:
                late.append(req)
        self.expired += len(late)
        return late

    def seconds_left(self, now: float) -> float:
        """Return the seconds until the next deadline, infinity without one. It may be one of an ended request."""
        return max(0.0, self._heap[0][0] - now) if self._heap else math.inf
