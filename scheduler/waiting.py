"""Requests that wait for memory, and the order in which they are tried.

They are ordered first by *rank*: with priorities, requests of a higher one go first; without, all have the same rank.
Within a rank, retracted requests go first, as most of their clients are reading already. The others follow by the
policy, in one *lane*. With fair shares there is a lane for each tenant, and the lane of the tenant that received least
is next. Incoming requests, with KV that comes from a peer, are in the same order as computing ones. ``claims.py``
decides which of them may have memory now.

A request is queued → (parked → given back)* → removed. There are two ways of parking:

- ``set_aside`` (for ``shared_prompts.py`` and ``store_waits.py``): the request keeps its tenant's lane open, but is
  not tried.
- ``park`` (for ``optional_claims.py``): the request is only counted. It keeps no lane open.

Parked requests add nothing to the cost of an order, however many there are. Nor do the lanes of incoming requests add
to the cost of an order of computing ones.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from .fairness import NO_SHARE, NoShares, Shares, Tenant
from .policies.base import SchedulePolicy
from .req import Req, Route
from .turns import Turn, Turns

NO_LANE = 0
"""Number that no lane has: lanes are counted from 1."""


class _Lane(NamedTuple):
    rank: int
    tenant: Tenant


def _turn(req: Req) -> float:
    return req.times.fcfs_time


class WaitingQueue:
    """Owner of the waiting requests; see the module.

    ``shares``: service counted by tenant, if it is. ``ranks``: whether priorities count. ``low_first``: whether
    low values go first.
    """

    def __init__(
        self, policy: SchedulePolicy, shares: Shares | None = None, *, ranks: bool = False, low_first: bool = False
    ) -> None:
        self.policy = policy
        self.shares: Shares = shares or NoShares()
        self.has_ranks = ranks
        self._sign = 1 if low_first else -1
        self._reqs: dict[str, Req] = {}
        self._queued: set[Req] = set()
        self._parked: set[Req] = set()
        self._incoming = 0
        self._retracted: dict[int, list[Req]] = {}
        self._lanes: dict[_Lane, int] = {}
        self._sizes: dict[_Lane, int] = {}
        self._turns: dict[int, Turns] = {}
        """Lanes with requests to try, by rank."""
        self._computing_turns: dict[int, Turns] = {}
        """Lanes with requests to try that compute their prompts here, by rank."""
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._reqs)

    def __contains__(self, rid: str) -> bool:
        return rid in self._reqs

    def __iter__(self) -> Iterator[str]:
        return iter(self._reqs)

    def has(self, req: Req) -> bool:
        """Return whether this very request waits, and not another one of its rid."""
        return self._reqs.get(req.rid) is req

    def values(self) -> Iterator[Req]:
        """Return all waiting requests, parked ones included, in the order in which they were queued."""
        return iter(self._reqs.values())

    @property
    def num_computing(self) -> int:
        """Number of waiting requests that compute their prompts here."""
        return len(self._reqs) - self._incoming

    def computing(self) -> Iterator[Req]:
        """Return the waiting requests that compute their prompts here, also parked ones, in the order of queueing."""
        return (req for req in self._reqs.values() if req.route is not Route.INCOMING)

    def is_below_share(self, key: str, room: int) -> bool:
        """Return whether one more request of this API key is to be admitted although the queue of ``room`` requests is
        full.
        """
        return self.shares.is_below_share(key, room)

    def has_share_for_others(self, room: int) -> bool:
        """Return whether an API key without requests would be admitted although the queue of ``room`` is full."""
        return self.shares.has_share_for_others(room)

    def rank(self, req: Req) -> int:
        """Return the rank of a request. Lower ranks go first, before any other rule."""
        return self._sign * req.msg.priority if self.has_ranks else 0

    def precedence(self, req: Req) -> tuple[int, bool, tuple[float, float], float, str]:
        """Return the sort key of a request that has memory, by the order of the queue; the first one has the smallest.

        Instead of the policy, which orders prompts, the arrival counts.
        """
        is_retracted = req.retractions > 0
        share = NO_SHARE if is_retracted else self.shares.share(req.tenant)
        return self.rank(req), not is_retracted, share, req.times.fcfs_time, req.rid

    def add(self, req: Req, lane: int | None = None) -> None:
        """Queue a request. ``lane``: its number from ``lane_of`` if it waited before; None for a new request."""
        self._reqs[req.rid] = req
        self._incoming += req.route is Route.INCOMING
        self._place(req, lane)

    def lane_of(self, req: Req) -> int | None:
        """Return the number of the lane that a request waits in, so that it can be queued again where it was.

        Return None if the lane has no request.
        """
        return self._lanes.get(self._lane(req))

    def remove(self, rid: str) -> None:
        """Remove a request from the queue; does nothing if it does not wait."""
        req = self._reqs.pop(rid, None)
        if req is None:
            return
        self._incoming -= req.route is Route.INCOMING
        self._unplace(req)
        self._parked.discard(req)

    def park(self, req: Req) -> None:
        """Keep a waiting request from being tried until ``give_back``; it stays a member of the queue.

        If it is the last of its tenant and rank that is not parked, the tenant counts as one that does not wait.
        """
        self._unplace(req)
        self._parked.add(req)

    def set_aside(self, req: Req) -> None:
        """Keep a waiting request from being tried until ``give_back``, as ``park`` does.

        Its tenant still counts as waiting.
        """
        self._take(req)

    def give_back(self, req: Req) -> None:
        """Let a parked request be tried again. Do nothing if it no longer waits or is not parked."""
        if not self.has(req) or req in self._queued:
            return
        if req in self._parked:
            self._parked.remove(req)
            self._place(req)
        else:
            self._queue(req)

    def order(self, *, computing_only: bool = False) -> Iterator[Req]:
        """Yield the waiting requests to try, in order, and determine each one only when it is drawn.

        ``computing_only``: leave out incoming ones. A request may be removed or parked before the next is drawn; none
        may be added.
        """
        turns = self._computing_turns if computing_only else self._turns
        for rank in sorted(turns.keys() | self._retracted.keys()):
            yield from list(self._retracted.get(rank, ()))
            if (of_rank := turns.get(rank)) is None:
                continue
            # A tenant that is alone needs no turns. Without fair shares, every step passes here.
            if len(of_rank.sizes) == 1:
                yield from self.policy.order(next(iter(of_rank.sizes)), computing_only=computing_only)
            else:
                yield from self._in_turn(of_rank, computing_only)

    def as_if_queued(self, lanes: Mapping[Req, int | None]) -> list[Req]:
        """Return requests that do not wait, none of them retracted, in the order in which they would be tried.

        ``lanes``: the lanes in which they waited, from ``lane_of``. Equal shares go by these numbers.
        """
        members: dict[_Lane, list[Req]] = {}
        for req in lanes:
            members.setdefault(self._lane(req), []).append(req)
        turns = [
            (lane.rank, self.shares.share(lane.tenant), min(lanes[req] or 0 for req in reqs), reqs)
            for lane, reqs in members.items()
        ]
        found: list[Req] = []
        for *_, reqs in sorted(turns, key=lambda turn: turn[:3]):
            for req in reqs:
                self.policy.add(req, NO_LANE)
            found += list(self.policy.order(NO_LANE))
            for req in reqs:
                self.policy.remove(req)
        return found

    def ahead_of(self, req: Req, uncached: int, others: Iterable[Req]) -> list[Req]:
        """Return those of ``others``, waiting or in the middle of their prompts, that are expected to go before
        ``req``.

        Priorities and the policy decide; fair shares are not considered. ``uncached``: tokens of ``req`` to be
        computed.
        """
        if not self.has_ranks:
            return self.policy.ahead_of(req, uncached, others)
        rank, others = self.rank(req), list(others)
        alike = [r for r in others if self.rank(r) == rank]
        return [r for r in others if self.rank(r) < rank] + self.policy.ahead_of(req, uncached, alike)

    def is_before(self, waiting: Req, begun: Req) -> bool:
        """Return whether the request ``waiting`` goes before ``begun``, which is in the middle of its prompt."""
        if self.rank(waiting) != self.rank(begun):
            return self.rank(waiting) < self.rank(begun)
        return self.policy.is_before(waiting, begun)

    def _in_turn(self, turns: Turns, computing_only: bool) -> Iterator[Req]:
        tried: dict[int, Iterator[Req]] = {}
        over: list[Turn] = []
        try:
            while (first := turns.first()) is not None:
                if first.number not in tried:
                    tried[first.number] = self.policy.order(first.number, computing_only=computing_only)
                if (req := next(tried[first.number], None)) is not None:
                    yield req
                else:
                    over.append(turns.skip())
        finally:
            for turn in over:
                turns.put(turn)

    def _place(self, req: Req, number: int | None = None) -> None:
        if not req.retractions:
            self._enter(self._lane(req), number)
        self._queue(req)

    def _unplace(self, req: Req) -> None:
        self._take(req)
        if not req.retractions and req not in self._parked:
            self._leave(self._lane(req))

    def _queue(self, req: Req) -> None:
        self._queued.add(req)
        if req.retractions:
            insort(self._retracted.setdefault(self.rank(req), []), req, key=_turn)
            return
        lane = self._lane(req)
        number = self._lanes[lane]
        self.policy.add(req, number)
        for turns in self._turns_of(req):
            if lane.rank not in turns:
                turns[lane.rank] = Turns(self.shares)
            turns[lane.rank].add(number, lane.tenant)

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
        self.policy.remove(req)
        lane = self._lane(req)
        for turns in self._turns_of(req):
            turns[lane.rank].remove(self._lanes[lane])
            if not turns[lane.rank].sizes:
                del turns[lane.rank]

    def _turns_of(self, req: Req) -> list[dict[int, Turns]]:
        return [self._turns] if req.route is Route.INCOMING else [self._turns, self._computing_turns]

    def _enter(self, lane: _Lane, number: int | None) -> None:
        if lane not in self._lanes:
            self._open(lane, number)
        self._sizes[lane] += 1

    def _leave(self, lane: _Lane) -> None:
        self._sizes[lane] -= 1
        if not self._sizes[lane]:
            del self._lanes[lane], self._sizes[lane]
            self.shares.waits_no_more(lane.tenant)

    def _open(self, lane: _Lane, number: int | None) -> None:
        is_again = number is not None
        if number is None:
            self._numbers += 1
            number = self._numbers
        self._lanes[lane], self._sizes[lane] = number, 0
        self.shares.waits(lane.tenant, again=is_again)

    def _lane(self, req: Req) -> _Lane:
        return _Lane(self.rank(req), self.shares.lane(req.tenant))
