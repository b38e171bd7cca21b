"""Claims that no request depends on. A tick looks at only a few of them."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

from .req import Req
from .waiting import WaitingQueue

MOST_OPTIONAL = 8
"""Maximum optional claims in the queue's order, and so tried in one tick."""


class _ClaimKey(NamedTuple):
    """Sort key among optional claims. ``number`` differs, so requests are not compared."""

    rank: int
    fcfs_time: float
    number: int
    req: Req


class OptionalClaims:
    """The optional claims, by rank and then by arrival.

    The first ``MOST_OPTIONAL`` of them are in the order of the waiting queue. The others are parked there, so that ten
    thousand cost a tick as much as eight. Fair shares and the policy do not choose the first ones: all would have to be
    sorted again whenever a tenant is served.
    """

    def __init__(self, waiting: WaitingQueue) -> None:
        self._waiting = waiting
        self._keys: dict[str, _ClaimKey] = {}
        self._line: list[_ClaimKey] = []
        self._number = 0

    def __contains__(self, rid: str) -> bool:
        return rid in self._keys

    def add(self, req: Req) -> None:
        """Note that the claim of a request, which was just queued, is optional.

        Only the first ``MOST_OPTIONAL`` stay in the waiting queue's order. If there are more, it or the one that it
        displaces is parked.
        """
        self._number += 1
        claim_key = _ClaimKey(self._waiting.rank(req), req.times.fcfs_time, self._number, req)
        self._keys[req.rid] = claim_key
        insort(self._line, claim_key)
        if len(self._line) > MOST_OPTIONAL:
            last = self._line[max(MOST_OPTIONAL, bisect_left(self._line, claim_key))]
            self._waiting.park(last.req)

    def remove(self, rid: str) -> bool:
        """Remove the optional claim of request ``rid``. Return whether there was one.

        If it was among the first ``MOST_OPTIONAL``, the first parked claim is put back into the waiting
        queue's order.
        So ``WaitingQueue.order`` must not be iterated meanwhile.
        """
        claim_key = self._keys.pop(rid, None)
        if claim_key is None:
            return False
        at = bisect_left(self._line, claim_key)
        del self._line[at]
        if at < MOST_OPTIONAL <= len(self._line):
            self._waiting.give_back(self._line[MOST_OPTIONAL - 1].req)
        return True
