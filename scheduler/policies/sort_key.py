"""Policies that fix a request's position when it arrives: fcfs, lof, random."""

from __future__ import annotations

import random
from abc import abstractmethod
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple, Self
from weakref import WeakKeyDictionary

from ..req import Req, Route
from .base import PolicyNeeds, SchedulePolicy


class _SortKey(NamedTuple):
    """Sort key: ``key``, then the order in which requests were queued."""

    key: tuple[float, float]
    number: int


class _SortedLane:
    """Requests of one lane, in order. Adding and removing costs a search and a move of pointers."""

    def __init__(self) -> None:
        self.keys: list[_SortKey] = []
        self.reqs: list[Req] = []


class SortKeyPolicy(SchedulePolicy):
    """Base of policies that sort by a key which never changes."""

    def __init__(self) -> None:
        self._lanes: dict[int, _SortedLane] = {}
        self._keys: dict[Req, tuple[int, _SortKey]] = {}
        self._number = 0

    @abstractmethod
    def key(self, req: Req) -> tuple[float, float]:
        """Return the sort key of a request, smallest first."""

    def add(self, req: Req, lane: int) -> None:
        self._number += 1
        sort_key = _SortKey(self.key(req), self._number)
        self._keys[req] = lane, sort_key
        found = self._lanes.setdefault(lane, _SortedLane())
        insort(found.keys, sort_key)
        found.reqs.insert(bisect_left(found.keys, sort_key), req)

    def remove(self, req: Req) -> None:
        lane, sort_key = self._keys.pop(req)
        found = self._lanes[lane]
        at = bisect_left(found.keys, sort_key)
        del found.keys[at], found.reqs[at]
        if not found.reqs:
            del self._lanes[lane]

    def order(self, lane: int, *, computing_only: bool = False) -> Iterator[Req]:
        found = self._lanes.get(lane)
        reqs = list(found.reqs) if found is not None else []
        return (req for req in reqs if not computing_only or req.route is not Route.INCOMING)


class FirstComeFirstServed(SortKeyPolicy):
    """Order of arrival, a batch's prompts one after the other (``ReqTimes.fcfs_time``)."""

    def key(self, req: Req) -> tuple[float, float]:
        return req.times.fcfs_time, 0.0


class LongestOutputFirst(SortKeyPolicy):
    """Order by the maximum output, longest first (SGLang's lof).

    A load that has an end is over sooner, as no long request is left to run alone at the end.
    """

    def key(self, req: Req) -> tuple[float, float]:
        return -req.max_new_tokens, req.times.fcfs_time


class Random(SortKeyPolicy):
    """Random order. A request keeps the number that is drawn when it is first queued.

    So one that waits again, because its grant was revoked or it was parked, is where it was. Equal seeds and arrivals
    give equal orders.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._rng = random.Random(seed)
        self._drawn: WeakKeyDictionary[Req, float] = WeakKeyDictionary()

    @classmethod
    def make(cls, needs: PolicyNeeds) -> Self:
        return cls(needs.options.random_seed)

    def key(self, req: Req) -> tuple[float, float]:
        if (drawn := self._drawn.get(req)) is None:
            drawn = self._drawn[req] = self._rng.random()
        return drawn, 0.0
