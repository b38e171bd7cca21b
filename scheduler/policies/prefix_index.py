"""How much of each waiting prompt is cached, for ten thousand of them, without asking the tree for each at each step.

The prompts are kept in the order of their bytes, so those that begin alike stand side by side. What happens to a prefix
happens to a run of them. For each prompt the index has an upper bound of what is cached:

- What is *stored* raises the bounds of the run that begins alike, at once (``stored``). That takes a few searches and
  one vectorised maximum, however many there are.
- What is *lost* (evicted, flushed) is noticed when a bound is to be used (``confirm``). Then the tree is asked, and the
  whole run that shares the lost page is lowered with the one that was asked for.

A policy takes the best by its bound, confirms it, and chooses again if it has fallen. So it follows the true order. If
nothing was lost since a bound was confirmed, the bound is exact, and the tree is not asked.

Waiting requests are named by *slots*, which index the arrays and are theirs until they leave. ``positions`` are indices
in the order.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...messages.base import I32
from ..kv_memory import KVMemory
from ..req import Req, Route

TOKEN_BYTES = 4
FIRST_CAPACITY = 64
Slots = NDArray[np.int64]
Key = tuple[str, bytes]


def common_tokens(a: I32, b: I32) -> int:
    """Return how many first tokens two arrays of equal length have in common."""
    differ = a != b
    at = int(differ.argmax()) if differ.size else 0
    return at if differ.size and differ[at] else differ.size


class _LaneOrder(NamedTuple):
    """The slots of one lane, in the order of their prompts, so that an order of the lane looks at no other.

    ``common``: tokens (whole pages) that each prompt has in common with the next one; the last entry is meaningless.
    """

    slots: array[int]
    common: array[int]


class PrefixIndex:
    """Index of the waiting prompts by prefix. Arrays are [capacity], and valid at slots that are ``alive`` (bool).

    ``matched``: upper bound of the cached prefix (tokens, whole pages). ``fcfs_time``: ``ReqTimes.fcfs_time``.
    ``computes`` (bool): no peer computes the prompt. ``length``: known tokens, 0 if a peer computes it. ``order`` [N]:
    slots by position.
    """

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory
        self._page = memory.pool.page_size
        memory.pool.watch_stored(self.stored)
        self._slot_of: dict[Req, int] = {}
        self._lane_of: dict[int, int] = {}
        """Lane of each slot."""
        self._req_at: dict[int, Req] = {}
        self._free = list(range(FIRST_CAPACITY - 1, -1, -1))
        self._keys: list[Key] = []
        self.order: Slots = np.empty(0, dtype=np.int64)
        self._lanes: dict[int, _LaneOrder] = {}
        self.alive = np.zeros(FIRST_CAPACITY, dtype=np.bool_)
        self.matched = np.zeros(FIRST_CAPACITY, dtype=np.int64)
        self.length = np.zeros(FIRST_CAPACITY, dtype=np.int64)
        self.computes = np.zeros(FIRST_CAPACITY, dtype=np.bool_)
        self.fcfs_time = np.zeros(FIRST_CAPACITY, dtype=np.float64)
        self._limit = np.zeros(FIRST_CAPACITY, dtype=np.int64)
        self._confirmed = np.zeros(FIRST_CAPACITY, dtype=np.int64)
        """Number of losses when the bound was last exact."""
        self.raises = 0
        """How often bounds may have risen."""

    def __len__(self) -> int:
        return len(self._keys)

    def req_at(self, slot: int) -> Req:
        """Return the request that has this slot of the index."""
        return self._req_at[slot]

    def matched_of(self, req: Req) -> int:
        """Return the upper bound of a waiting request's cached prefix, in tokens."""
        return int(self.matched[self._slot_of[req]])

    def add(self, req: Req, lane: int) -> None:
        """Add a request that waits in ``lane`` from now on, and look up its cached prefix."""
        if not self._free:
            self._double()
        slot = self._free.pop()
        self._slot_of[req], self._req_at[slot] = slot, req
        self.alive[slot], self.fcfs_time[slot] = True, req.times.fcfs_time
        self.computes[slot] = req.route is not Route.INCOMING
        self.length[slot] = req.known_len if self.computes[slot] else 0
        # The output of a request from another instance follows its prompt, and is in no other request's order.
        self._limit[slot] = min(req.longest_reusable_prefix, req.prompt_len) // self._page * self._page
        self.matched[slot], self._confirmed[slot] = self._cached(req, slot), self._memory.pool.losses
        key = self._key_at(slot)
        at = bisect_right(self._keys, key)
        self._keys.insert(at, key)
        self.order = np.insert(self.order, at, slot)
        self._add_to_lane(slot, lane, key)

    def remove(self, req: Req) -> None:
        """Remove a request that no longer waits."""
        slot = self._slot_of.pop(req)
        at = int(np.flatnonzero(self.order == slot)[0])
        del self._keys[at]
        self.order = np.delete(self.order, at)
        self._remove_from_lane(slot)
        self.alive[slot] = False
        del self._req_at[slot]
        self._free.append(slot)

    def in_lane(self, lane: int, *, computing_only: bool) -> tuple[Slots, Slots]:
        """Return the slots [N] of a lane in the order of their prompts, and what neighbours have in common [N - 1].

        That is in tokens (whole pages), cached or not. ``computing_only``: leave out prompts that a peer computes.
        """
        found = self._lanes.get(lane)
        if found is None:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        # Copies, as an array that is looked at can't grow.
        slots, common = (np.frombuffer(part, dtype=np.int64).copy() for part in (found.slots, found.common))
        if computing_only:
            kept = np.flatnonzero(self.computes[slots])
            # Two neighbours share as much as the least that any two between them share.
            slots, common = slots[kept], np.minimum.reduceat(common, kept) if kept.size else common[:0]
        return slots, common[:-1]

    def stored(self, extra_key: str, tokens: I32, start: int) -> None:
        """Raise the upper bounds of the cached prefix of all prompts that begin like ``tokens`` [N].

        The whole pages of ``tokens`` are cached now; ``[0, start)`` of them were cached before.
        """
        end = len(tokens) // self._page * self._page
        if end <= start or not self._keys:
            return
        key = extra_key, tokens[:end].tobytes()
        low, high = self._run(key, end)
        self._raise(low, high, end)
        while low and (length := self._common(self._keys[low - 1], key)) > start:
            above, low = low, self._run(key, length)[0]
            self._raise(low, above, length)
        while high < len(self._keys) and (length := self._common(self._keys[high], key)) > start:
            below, high = high, self._run(key, length)[1]
            self._raise(below, high, length)

    def confirm(self, slot: int) -> bool:
        """Return whether the slot's bound is exactly what is cached of its prompt now.

        If not, lower it, and the bounds of other prompts that lost the same page.
        """
        losses = self._memory.pool.losses
        if self._confirmed[slot] == losses and not self._memory.pool.has_windows:
            return True
        req, bound = self.req_at(slot), int(self.matched[slot])
        true = self._cached(req, slot)
        if true >= bound:
            self.matched[slot], self._confirmed[slot] = true, losses
            return True
        # With windows, the page at ``true`` may be cached, and of use to prompts that continue after it.
        if self._memory.pool.has_windows:
            slots = np.array([slot])
        else:
            low, high = self._run((req.msg.extra_key, req.msg.input_ids), true + self._page)
            slots = self.order[low:high]
        self.matched[slots] = np.minimum(self.matched[slots], true)
        self._confirmed[slot] = losses
        return False

    def _key_at(self, slot: int) -> Key:
        msg = self._req_at[slot].msg
        return msg.extra_key, msg.input_ids

    def _add_to_lane(self, slot: int, lane: int, key: Key) -> None:
        self._lane_of[slot] = lane
        slots, common = self._lanes.setdefault(lane, _LaneOrder(array("q"), array("q")))
        at = bisect_right(slots, key, key=self._key_at)
        if at:
            common[at - 1] = self._common(self._key_at(slots[at - 1]), key)
        common.insert(at, self._common(key, self._key_at(slots[at])) if at < len(slots) else 0)
        slots.insert(at, slot)

    def _remove_from_lane(self, slot: int) -> None:
        lane = self._lane_of.pop(slot)
        slots, common = self._lanes[lane]
        at = slots.index(slot, bisect_left(slots, self._key_at(slot), key=self._key_at))
        if at:
            common[at - 1] = min(common[at - 1], common[at])
        del slots[at], common[at]
        if not slots:
            del self._lanes[lane]

    def _run(self, key: Key, length: int) -> tuple[int, int]:
        """Return the range ``[low, high)`` of positions in the order at which prompts begin like ``key``.

        They have its namespace and its first ``length`` tokens. The range is empty if there are none.
        """
        num_bytes = length * TOKEN_BYTES
        sought = key[0], key[1][:num_bytes]

        def beginning(other: Key) -> Key:
            return other[0], other[1][:num_bytes]

        low = bisect_left(self._keys, sought, key=beginning)
        return low, bisect_right(self._keys, sought, low, key=beginning)

    def _raise(self, low: int, high: int, length: int) -> None:
        self.raises += 1
        slots = self.order[low:high]
        self.matched[slots] = np.maximum(self.matched[slots], np.minimum(self._limit[slots], length))

    def _cached(self, req: Req, slot: int) -> int:
        return min(self._memory.prefix_len(req), int(self._limit[slot]))

    def _common(self, one: Key, other: Key) -> int:
        """Return how many first tokens, in whole pages, both prompts have in common; 0 in different namespaces."""
        if one[0] != other[0]:
            return 0
        count = min(len(one[1]), len(other[1])) // TOKEN_BYTES
        a = np.frombuffer(one[1], dtype=np.int32, count=count)
        b = np.frombuffer(other[1], dtype=np.int32, count=count)
        return common_tokens(a, b) // self._page * self._page

    def _double(self) -> None:
        size = len(self.alive)
        self._free = list(range(2 * size - 1, size - 1, -1))

        def grown(array: NDArray[Any]) -> NDArray[Any]:
            return np.concatenate([array, np.zeros(size, dtype=array.dtype)])

        self.alive, self.matched, self.length = grown(self.alive), grown(self.matched), grown(self.length)
        self.computes, self.fcfs_time = grown(self.computes), grown(self.fcfs_time)
        self._limit, self._confirmed = grown(self._limit), grown(self._confirmed)
