"""What a store says it has of a prompt before any of it is fetched, and how long fetches take.

Only a request that has another way to the KV asks first; others fetch whatever there is. Such a probe is waited for no
longer than ``LOOK_SECONDS``, and no longer than the result could be of use. A store that has owed an answer for longer
is not probed: it would not be the faster way.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ..messages.tiers import PagesFound
from .estimates.outcomes import Line

LOOK_SECONDS = 0.25
USUAL_BYTES_A_MS = 1_000_000
"""Assumed speed of a store before its first fetch. Rather too high: a store that is never asked is never measured."""
STEEPEST = 1000.0
"""Maximum factor by which a store may be slower than that."""


class _Probe(NamedTuple):
    rid: str
    asked_at: float


class StoreIndex:
    """Owner of the probes under way, of their results, and of the learned speed of fetches."""

    def __init__(self, page_bytes: int) -> None:
        self._usual_ms = page_bytes / USUAL_BYTES_A_MS
        self._looks: dict[int, _Probe] = {}
        """Probes under way, in the order of their start."""
        self._ends: deque[int] = deque()
        """Probes that may still be waited for, in the same order."""
        self._looking: dict[str, int] = {}
        self._seen: dict[str, int] = {}
        self._took = Line(1.0, steepest=STEEPEST)

    def begin(self, look_id: int, rid: str, now: float) -> None:
        """Record that the store was sent the question ``look_id``, a ``FindPages``, for request ``rid`` at ``now``."""
        self._looks[look_id] = _Probe(rid, now)
        self._looking[rid] = look_id
        self._ends.append(look_id)

    def on_found(self, event: PagesFound) -> None:
        """Record the store's answer to a question: how many of the pages it has."""
        look = self._looks.pop(event.id)
        if self._looking.get(look.rid) == event.id:
            del self._looking[look.rid]
            self._seen[look.rid] = event.count

    def is_looking(self, rid: str, now: float) -> bool:
        """Return whether a question about the request's pages is unanswered and younger than ``LOOK_SECONDS``."""
        look = self._looks.get(self._looking.get(rid, 0))
        return look is not None and now < look.asked_at + LOOK_SECONDS

    def seen(self, rid: str) -> int:
        """Return how many of the request's pages the store said to have; 0 if it has not answered."""
        return self._seen.get(rid, 0)

    def forget(self, rid: str) -> None:
        """Forget the question to the store about the request's pages, and its answer."""
        self._looking.pop(rid, None)
        self._seen.pop(rid, None)

    @property
    def oldest(self) -> _Probe | None:
        """The first probe that the store has not answered."""
        return next(iter(self._looks.values()), None)

    def next_end(self, after: float) -> float | None:
        """Return the next time after ``after`` at which a request stops waiting for the store's answer; None if none
        waits.

        Times are ``time.monotonic()``. ``after`` must not decrease from call to call.
        """
        while self._ends:
            look = self._looks.get(self._ends[0])
            is_awaited = look is not None and self._looking.get(look.rid) == self._ends[0]
            if look is not None and is_awaited and look.asked_at + LOOK_SECONDS > after:
                return look.asked_at + LOOK_SECONDS
            self._ends.popleft()
        return None

    def learn(self, pages: int, seconds: float, now: float) -> None:
        """Learn the speed of fetches from one that brought ``pages`` pages, ``seconds`` after it was asked for."""
        if pages:
            self._took.learn(pages * self._usual_ms, seconds * 1000, now)

    def ms(self, pages: int, now: float) -> float:
        """Return the estimated milliseconds from the order to fetch ``pages`` pages until they have arrived.

        They include what the store usually has to do before.
        """
        return self._took.at(pages * self._usual_ms, now)
