"""In which order waiting requests are tried."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from .kv_memory import KVMemory
from .req import Req


class SchedulePolicy(ABC):
    """Orders the waiting queue. A retracted request always comes first: its client is already reading."""

    @abstractmethod
    def order(self, waiting: Iterable[Req], memory: KVMemory) -> list[Req]:
        """The queue in the order of admission; takes no memory, changes no request."""


class FirstComeFirstServed(SchedulePolicy):
    """Order of arrival, a batch's prompts one after the other (``ReqTimes.turn``)."""

    def order(self, waiting: Iterable[Req], memory: KVMemory) -> list[Req]:
        """See the base class."""
        return sorted(waiting, key=lambda r: (r.retractions == 0, r.times.turn))


class LongestPrefixMatch(SchedulePolicy):
    """Longest cached prefix first (SGLang's lpm): prompts that share a prefix run while it is still cached.

    Matching costs a walk of the tree for each request, so a long queue is only sorted by arrival.
    """

    MAX_SORTED = 128

    def order(self, waiting: Iterable[Req], memory: KVMemory) -> list[Req]:
        """See the base class."""
        reqs = FirstComeFirstServed().order(waiting, memory)
        if len(reqs) > self.MAX_SORTED:
            return reqs
        return sorted(reqs, key=lambda r: (r.retractions == 0, -memory.prefix_len(r)))


POLICIES: dict[str, type[SchedulePolicy]] = {"fcfs": FirstComeFirstServed, "lpm": LongestPrefixMatch}
