"""Requests that wait for memory and a turn, and in which order they are tried.

First by *rank*: with priorities, those of a higher one; without, all have the same. Within a rank those that were
retracted, as their clients are reading already, and then the others by the policy: in one *lane*, or, with fair shares,
in one for each tenant, of which that one is next that has had least.

A request is queued → (set aside → given back)* → removed. What is set aside (``shared_prompts.py``) waits like all
others, but is not tried.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..messages.base import I32
from .fairness import FairShares, Tenant
from .policies.base import SchedulePolicy
from .req import Req


class _Lane(NamedTuple):
    rank: int
    tenant: Tenant


def _turn(req: Req) -> float:
    return req.times.turn


class WaitingQueue:
    """See the module. ``shares`` None: nobody counts what whom was given. ``ranks``: whether priorities count, and
    ``low_first`` whether low values go first.
    """

    def __init__(
        self, policy: SchedulePolicy, shares: FairShares | None = None, *, ranks: bool = False, low_first: bool = False
    ) -> None:
        self.policy = policy
        self.shares = shares
        self.has_ranks = ranks
        self._sign = 1 if low_first else -1
        self._reqs: dict[str, Req] = {}
        self._queued: set[Req] = set()
        self._retracted: dict[int, list[Req]] = {}
        self._lanes: dict[_Lane, int] = {}
        self._sizes: dict[_Lane, int] = {}
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._reqs)

    def __contains__(self, rid: str) -> bool:
        return rid in self._reqs

    def __iter__(self) -> Iterator[str]:
        return iter(self._reqs)

    def values(self) -> Iterator[Req]:
        """All that wait, as they came to."""
        return iter(self._reqs.values())

    @property
    def any_retracted(self) -> bool:
        """Whether one that ran already waits."""
        return bool(self._retracted)

    def rank(self, req: Req) -> int:
        """Lower goes first, whatever else is said."""
        return self._sign * req.msg.priority if self.has_ranks else 0

    def add(self, req: Req) -> None:
        """The request waits from now on."""
        self._reqs[req.rid] = req
        self._queue(req)

    def remove(self, rid: str) -> None:
        """The request waits no longer; nothing to do where it did not."""
        req = self._reqs.pop(rid, None)
        if req is not None:
            self._take(req)

    def set_aside(self, req: Req) -> None:
        """Don't try the request until it is given back."""
        self._take(req)

    def give_back(self, req: Req) -> None:
        """Try it again, if it still waits."""
        if self._reqs.get(req.rid) is req and req not in self._queued:
            self._queue(req)

    def stored(self, extra_key: str, tokens: I32, start: int) -> None:
        """``KVMemory.on_stored``."""
        self.policy.stored(extra_key, tokens, start)

    def order(self) -> Iterator[Req]:
        """Those that are to be tried, the first one first, found as they are asked for.

        Who was given may be removed, or set aside, before the next is asked for; nobody may be added.
        """
        for rank in sorted({lane.rank for lane in self._lanes} | self._retracted.keys()):
            yield from list(self._retracted.get(rank, ()))
            lanes = [lane for lane in self._lanes if lane.rank == rank]
            if self.shares is None:
                for lane in lanes:
                    yield from self.policy.order(self._lanes[lane])
            else:
                yield from self._in_turn(lanes, self.shares)

    def ahead_of(self, req: Req, uncached: int, others: Iterable[Req]) -> list[Req]:
        """Of ``others``, who wait or are begun, those that go before ``req``: see the policy. Shares are left out."""
        if not self.has_ranks:
            return self.policy.ahead_of(req, uncached, others)
        rank, others = self.rank(req), list(others)
        alike = [r for r in others if self.rank(r) == rank]
        return [r for r in others if self.rank(r) < rank] + self.policy.ahead_of(req, uncached, alike)

    def is_before(self, waiting: Req, begun: Req) -> bool:
        """Whether one that waits goes before one that is in the middle of its prompt."""
        if self.rank(waiting) != self.rank(begun):
            return self.rank(waiting) < self.rank(begun)
        return self.policy.is_before(waiting, begun)

    def _in_turn(self, lanes: list[_Lane], shares: FairShares) -> Iterator[Req]:
        line = [(shares.share(lane.tenant), lane.tenant, self.policy.order(self._lanes[lane])) for lane in lanes]
        heapq.heapify(line)
        while line:
            share, tenant, reqs = heapq.heappop(line)
            if share != (now := shares.share(tenant)):  # it was given something since
                heapq.heappush(line, (now, tenant, reqs))
            elif (req := next(reqs, None)) is not None:
                yield req
                heapq.heappush(line, (shares.share(tenant), tenant, reqs))

    def _queue(self, req: Req) -> None:
        self._queued.add(req)
        if req.retractions:
            insort(self._retracted.setdefault(self.rank(req), []), req, key=_turn)
            return
        lane = self._lane(req)
        if lane not in self._lanes:
            if self.shares is not None:
                self.shares.comes_back(lane.tenant, (other.tenant for other in self._lanes))
            self._numbers += 1
            self._lanes[lane], self._sizes[lane] = self._numbers, 0
        self._sizes[lane] += 1
        self.policy.add(req, self._lanes[lane])

    def _take(self, req: Req) -> None:
        if req not in self._queued:
            return
        self._queued.remove(req)
        if req.retractions:
            line = self._retracted[self.rank(req)]
            line.remove(req)
            if not line:
                del self._retracted[self.rank(req)]
            return
        lane = self._lane(req)
        self.policy.remove(req)
        self._sizes[lane] -= 1
        if not self._sizes[lane]:
            del self._lanes[lane], self._sizes[lane]

    def _lane(self, req: Req) -> _Lane:
        return _Lane(self.rank(req), req.tenant if self.shares is not None else Tenant())
