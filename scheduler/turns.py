"""The order of lanes by what their tenants have received, for ``waiting.py``.

The next lane is one of the key that has received least, and within the key of the user that has. All users of a key
move when work is charged to it. So there are two levels of heaps: one of keys, and for each key one of its users'
lanes. An admission then moves one key, and not thousands of lanes.
"""

from __future__ import annotations

import heapq
from collections import Counter
from typing import NamedTuple

from .fairness import Shares, Tenant

FEW = 64
"""Entries that may be added to the heaps, beyond the number of lanes, before they are cleared of stale ones."""


class Turn(NamedTuple):
    """Sort key of a lane: its tenant's share when last looked at, then the order in which lanes were opened."""

    share: tuple[float, float]
    number: int
    tenant: Tenant


class _UserTurn(NamedTuple):
    """Sort key of a lane among those of its key: its user's share when last looked at, then its number."""

    share: float
    number: int
    tenant: Tenant


class Turns:
    """The lanes of one rank that have requests to try, or such requests of one kind.

    Only these are looked at, so thousands of lanes without any cost an order nothing. Heaps are put in order when they
    are read: shares may have grown since, some lanes are gone, and some are there twice.
    """

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self.sizes: Counter[int] = Counter()
        """Number of these requests by the number of their lane, which has at least one."""
        self._keys: list[Turn] = []
        """Heap of keys, each by its first lane."""
        self._entries: dict[str, Turn] = {}
        """The valid entry of each key in that heap. It is not above the key's first lane."""
        self._users: dict[str, list[_UserTurn]] = {}
        """Heaps of lanes, by key."""
        self._added = 0

    def __len__(self) -> int:
        """Return the number of entries, stale ones included."""
        return len(self._keys) + sum(map(len, self._users.values()))

    def add(self, number: int, tenant: Tenant) -> None:
        """Count one more request of a lane."""
        self.sizes[number] += 1
        if self.sizes[number] == 1:
            self.put(Turn(self._shares.share(tenant), number, tenant))

    def remove(self, number: int) -> None:
        """Count one request of a lane less."""
        self.sizes[number] -= 1
        if not self.sizes[number]:
            del self.sizes[number]

    def first(self) -> Turn | None:
        """Return the lane that is next; None without any. It stays where it is."""
        keys = self._keys
        while keys:
            entry = keys[0]
            key = entry.tenant.key
            if self._entries.get(key) is not entry:
                heapq.heappop(keys)
            elif (turn := self._first_of(key)) == entry:
                return turn
            elif turn is None:
                heapq.heappop(keys)
                del self._entries[key]
            else:
                heapq.heapreplace(keys, turn)
                self._entries[key] = turn
        return None

    def skip(self) -> Turn:
        """Take out the lane that ``first`` has just returned, and return it. The caller puts it back."""
        turn = self._keys[0]
        heapq.heappop(self._users[turn.tenant.key])
        return turn

    def put(self, turn: Turn) -> None:
        """Add a lane to the heaps."""
        user_turn = _UserTurn(turn.share[1], turn.number, turn.tenant)
        key = turn.tenant.key
        heapq.heappush(self._users.setdefault(key, []), user_turn)
        if key not in self._entries or turn < self._entries[key]:
            heapq.heappush(self._keys, turn)
            self._entries[key] = turn
        self._added += 1
        if self._added > len(self.sizes) + FEW:
            self._clear()

    def _first_of(self, key: str) -> Turn | None:
        lanes = self._users.get(key, [])
        while lanes:
            first = lanes[0]
            if first.number not in self.sizes:
                heapq.heappop(lanes)
                continue
            share = self._shares.share(first.tenant)
            if share[1] == first.share:
                return Turn(share, first.number, first.tenant)
            heapq.heapreplace(lanes, first._replace(share=share[1]))  # it has received service since
        self._users.pop(key, None)
        return None

    def _clear(self) -> None:
        """Drop stale entries from the heaps."""
        self._added = 0
        for key, lanes in self._users.items():
            self._users[key] = list({lane.number: lane for lane in lanes if lane.number in self.sizes}.values())
            heapq.heapify(self._users[key])
        firsts = [self._first_of(key) for key in list(self._users)]
        self._keys = [turn for turn in firsts if turn is not None]
        self._entries = {turn.tenant.key: turn for turn in self._keys}
        heapq.heapify(self._keys)
