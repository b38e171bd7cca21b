"""What a store says that it has of a prompt, before any of it is fetched, and how long it would take to bring it.

Only who has another way to the KV looks first; others fetch whatever there is. A look is waited for no longer than
``LOOK_SECONDS``, nor than what is seen could be of use, and a store that owes an answer for longer is not looked at: it
would not be the sooner way.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ..messages.tiers import PagesFound
from .estimates.outcomes import Line

LOOK_SECONDS = 0.25
USUAL_BYTES_A_MS = 1_000_000
"""What a store is thought to give before it has given any: rather too much, as nobody finds out by not asking."""
STEEPEST = 1000.0
"""So many times as long as with that it takes at most."""


class _Probe(NamedTuple):
    rid: str
    asked_at: float


class StoreIndex:
    """Owner of the looks that are under way, of what they found, and of what fetches took."""

    def __init__(self, page_bytes: int) -> None:
        self._usual_ms = page_bytes / USUAL_BYTES_A_MS
        self._looks: dict[int, _Probe] = {}
        """As they were asked for."""
        self._ends: deque[int] = deque()
        """Looks that may not have been waited for long enough yet, in the same order."""
        self._looking: dict[str, int] = {}
        self._seen: dict[str, int] = {}
        self._took = Line(1.0, steepest=STEEPEST)

    def begin(self, look_id: int, rid: str, now: float) -> None:
        """The store was sent a ``FindPages`` for a request."""
        self._looks[look_id] = _Probe(rid, now)
        self._looking[rid] = look_id
        self._ends.append(look_id)

    def on_found(self, event: PagesFound) -> None:
        """It has looked."""
        look = self._looks.pop(event.id)
        if self._looking.get(look.rid) == event.id:
            del self._looking[look.rid]
            self._seen[look.rid] = event.count

    def is_looking(self, rid: str, now: float) -> bool:
        """Whether its answer is worth waiting for yet."""
        look = self._looks.get(self._looking.get(rid, 0))
        return look is not None and now < look.asked_at + LOOK_SECONDS

    def seen(self, rid: str) -> int:
        """How many pages it has of those that were asked for; 0 where it has not said."""
        return self._seen.get(rid, 0)

    def forget(self, rid: str) -> None:
        """Nobody wants to know any more."""
        self._looking.pop(rid, None)
        self._seen.pop(rid, None)

    @property
    def oldest(self) -> _Probe | None:
        """The first that it has not answered."""
        return next(iter(self._looks.values()), None)

    def next_end(self, after: float) -> float | None:
        """When a look that somebody waits for will have been waited for long enough: the first time ``after`` then,
        which does not become earlier from call to call.
        """
        while self._ends:
            look = self._looks.get(self._ends[0])
            is_awaited = look is not None and self._looking.get(look.rid) == self._ends[0]
            if look is not None and is_awaited and look.asked_at + LOOK_SECONDS > after:
                return look.asked_at + LOOK_SECONDS
            self._ends.popleft()
        return None

    def learn(self, pages: int, seconds: float, now: float) -> None:
        """So long after it was asked the store had brought so many."""
        if pages:
            self._took.learn(pages * self._usual_ms, seconds * 1000, now)

    def ms(self, pages: int, now: float) -> float:
        """How long it takes most likely, from being asked on, with what it usually has to do before."""
        return self._took.at(pages * self._usual_ms, now)
