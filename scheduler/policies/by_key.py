"""Policies that know a request's position when it arrives: fcfs, lof, random."""

from __future__ import annotations

import random
from abc import abstractmethod
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple, Self

from ..req import Req, Route
from .base import PolicyNeeds, SchedulePolicy


class _SortKey(NamedTuple):
    """Sort key: ``key``, then the order of arrival."""

    key: tuple[float, float]
    number: int


class _Line:
    """Requests of one lane, in order. Adding and removing costs a search and a move of pointers."""

    def __init__(self) -> None:
        self.places: list[_SortKey] = []
        self.reqs: list[Req] = []


class ByKey(SchedulePolicy):
    """Base of policies that order by a key which never changes."""

    def __init__(self) -> None:
        self._lines: dict[int, _Line] = {}
        self._places: dict[Req, tuple[int, _SortKey]] = {}
        self._number = 0

    @abstractmethod
    def key(self, req: Req) -> tuple[float, float]:
        """Return the sort key of a request, smallest first."""

    def add(self, req: Req, lane: int) -> None:
        self._number += 1
        place = _SortKey(self.key(req), self._number)
        self._places[req] = lane, place
        line = self._lines.setdefault(lane, _Line())
        insort(line.places, place)
        line.reqs.insert(bisect_left(line.places, place), req)

    def remove(self, req: Req) -> None:
        lane, place = self._places.pop(req)
        line = self._lines[lane]
        at = bisect_left(line.places, place)
        del line.places[at], line.reqs[at]
        if not line.reqs:
            del self._lines[lane]

    def order(self, lane: int, *, computing_only: bool = False) -> Iterator[Req]:
        line = self._lines.get(lane)
        reqs = list(line.reqs) if line is not None else []
        return (req for req in reqs if not computing_only or req.route is not Route.INCOMING)


class FirstComeFirstServed(ByKey):
    """Order of arrival, a batch's prompts one after the other (``ReqTimes.turn``)."""

    def key(self, req: Req) -> tuple[float, float]:
        return req.times.turn, 0.0


class LongestOutputFirst(ByKey):
    """Order by the maximum output, longest first (SGLang's lof).

    A load that has an end is over sooner, as no long request is left to run alone at the end.
    """

    def key(self, req: Req) -> tuple[float, float]:
        return -req.max_new_tokens, req.times.turn


class Random(ByKey):
    """Random order, drawn for each request as it arrives. Equal seeds and arrivals give equal orders."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._rng = random.Random(seed)

    @classmethod
    def make(cls, needs: PolicyNeeds) -> Self:
        return cls(needs.options.random_seed)

    def key(self, req: Req) -> tuple[float, float]:
        return self._rng.random(), 0.0
