"""Policies that order by the cached part of each prompt: lpm, dfs-weight."""

from __future__ import annotations

import heapq
import itertools
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ..kv_memory import KVMemory
from ..req import Req
from .base import PolicyNeeds, SchedulePolicy
from .prefix_index import PrefixIndex, Slots

I64 = NDArray[np.int64]
F64 = NDArray[np.float64]
Flags = NDArray[np.bool_]
Chooser = Callable[[Flags], int]
"""Function that returns the first of N slots among those that are left ([N]), by the present bounds.

Some must be left.
"""
Ranker = Callable[[Slots], F64]
"""Function that ranks slots [N] by the present bounds: the lowest first, equals by arrival.

A lower bound ranks no lower.
"""
FEW = 16
"""Number of requests found by scanning all slots; after these, all are sorted. A step seldom asks for more."""


class ByPrefix(SchedulePolicy):
    """Base of policies that take the best slot by the index's bounds, and choose again if its bound was too high."""

    def __init__(self, memory: KVMemory) -> None:
        self.index = PrefixIndex(memory)

    @classmethod
    def make(cls, needs: PolicyNeeds) -> Self:
        return cls(needs.memory)

    def add(self, req: Req, lane: int) -> None:
        self.index.add(req, lane)

    def remove(self, req: Req) -> None:
        self.index.remove(req)

    def order(self, lane: int, *, computing_only: bool = False) -> Iterator[Req]:
        # Nothing is looked at before it is drawn: of thousands of lanes a step may get to one.
        index = self.index
        slots, common = index.in_lane(lane, computing_only=computing_only)
        if len(slots) == 1:  # nothing to choose, as in most lanes of a crowd
            while not index.confirm(int(slots[0])):
                pass
            yield index.req_at(int(slots[0]))
            return
        left: Flags = np.ones(len(slots), dtype=np.bool_)
        yield from self._taken(slots, left, self.chooser(slots, common))

    def _taken(self, slots: Slots, left: Flags, choose: Chooser) -> Iterator[Req]:
        """Yield the requests of the ``slots`` that have a flag in ``left`` [N], as ``choose`` picks them, and clear it.

        ``choose`` returns the position of the next one in ``slots``. It is asked again if less is cached than assumed.
        Requests that were removed from the index meanwhile are left out.
        """
        index = self.index
        while True:
            left &= index.alive[slots]
            if not left.any():
                return
            at = choose(left)
            if index.confirm(int(slots[at])):
                left[at] = False
                yield index.req_at(int(slots[at]))

    @abstractmethod
    def chooser(self, slots: Slots, common: Slots) -> Chooser:
        """Return the function that chooses the next request among those in ``slots`` [N].

        It gets flags [N] of those that are left, and returns an index. ``common`` [N - 1]: tokens that neighbours begin
        with alike, cached or not.
        """


class ByRank(ByPrefix):
    """Base of policies that order by a number computed from each bound."""

    @abstractmethod
    def ranker(self) -> Ranker:
        """Return a function that maps slots [N] to numbers; the request with the lowest number goes first."""

    def chooser(self, slots: Slots, common: Slots) -> Chooser:
        turn, rank = self.index.fcfs_time[slots], self.ranker()

        def choose(left: Flags) -> int:
            ranks = np.where(left, rank(slots), np.inf)
            lowest = np.flatnonzero(ranks == ranks.min())
            return int(lowest[turn[lowest].argmin()])

        return choose

    def _taken(self, slots: Slots, left: Flags, choose: Chooser) -> Iterator[Req]:
        few = super()._taken(slots, left, choose)
        yield from itertools.islice(few, FEW)
        while (left & self.index.alive[slots]).any():
            yield from self._queued(slots, left)

    def _queued(self, slots: Slots, left: Flags) -> Iterator[Req]:
        """Yield requests and clear their flags in ``left`` as ``_taken`` does, from a sorted queue, until a prefix is
        stored.

        A request with less cached than assumed is sorted in again when it is drawn, as that changes its own rank alone.
        """
        index, rank, raises = self.index, self.ranker(), self.index.raises
        places = np.flatnonzero(left)
        ranks, turns = rank(slots[places]), index.fcfs_time[slots[places]]
        by_rank = np.lexsort((turns, ranks))
        columns = (ranks, turns, places, slots[places], index.matched[slots[places]])
        line = deque(zip(*(column[by_rank].tolist() for column in columns), strict=True))
        fallen: list[tuple[float, float, int, int, int]] = []
        while (line or fallen) and index.raises == raises:
            if fallen and (not line or fallen[0] < line[0]):
                _, turn, place, slot, bound = heapq.heappop(fallen)
            else:
                _, turn, place, slot, bound = line.popleft()
            if not index.alive[slot]:
                left[place] = False
            elif index.matched[slot] == bound and index.confirm(slot):
                left[place] = False
                yield index.req_at(slot)
            else:
                now = rank(np.array([slot]))[0]
                heapq.heappush(fallen, (float(now), turn, place, slot, int(index.matched[slot])))


class LongestPrefixMatch(ByRank):
    """Order by cached prefix, longest first (SGLang's lpm), equals by arrival.

    Prompts that share a prefix run while it is still cached.
    """

    def ranker(self) -> Ranker:
        return lambda slots: -self.index.matched[slots].astype(np.float64)


class HeaviestPrefixFirst(ByPrefix):
    """Depth-first order through the cached prefixes, from each branch to where most requests wait (SGLang's
    dfs-weight).

    All requests that share a prefix run one after the other, and the prefix shared most is used while it is cached. The
    order within a step counts the requests that waited at its beginning, or each admission would make its own branch
    lighter.
    """

    def chooser(self, slots: Slots, common: Slots) -> Chooser:
        index, turn = self.index, self.index.fcfs_time[slots]

        def choose(left: Flags) -> int:
            return _heaviest(index.matched[slots], common, turn, left)

        return choose


def _heaviest(matched: I64, alike: I64, turn: NDArray[np.float64], left: Flags) -> int:
    """Return the index of the next request among those that are ``left``: depth first, through the heaviest branches.

    A branch is a set of requests that share a cached prefix. ``matched``: their cached tokens. ``turn``: their arrival.
    All arrays are [N], except ``alike`` [N - 1]: tokens that neighbours begin with alike, cached or not.
    """
    shared = np.minimum(np.minimum(matched[:-1], matched[1:]), alike)
    low, high = 0, len(matched)
    while True:
        # This is one branch of the cached prefixes. It stays together down to this depth, where some end and others
        # part.
        depth = min(matched[low:high].min(), shared[low : high - 1].min(initial=matched[low]))
        starts = np.concatenate([[low], low + 1 + np.flatnonzero(shared[low : high - 1] <= depth)])
        ends = np.append(starts[1:], high)
        waiting = np.add.reduceat(left[low:high], starts - low, dtype=np.int64)
        branches = np.flatnonzero((matched[starts] > depth) & (waiting > 0))
        if not branches.size:
            here = low + np.flatnonzero(left[low:high])
            return int(here[turn[here].argmin()])
        weight = (ends - starts)[branches]
        heaviest = branches[weight == weight.max()]
        chosen = heaviest[np.minimum.reduceat(turn[low:high], starts - low)[heaviest].argmin()]
        low, high = int(starts[chosen]), int(ends[chosen])
