"""How fast the queue moves: what a client is told that finds it full."""

from __future__ import annotations

from .pace import PaceMeter

MEMORY_TURNS = 32
"""The time between two turns is averaged over so many."""


class Turns:
    """Watches when requests get their turn, one after the other while others wait."""

    def __init__(self, pace: PaceMeter) -> None:
        self._pace = pace
        self._last = 0.0
        self._seconds = 0.0
        self._prompts_at = -1.0
        self._prompts_seconds = 0.0

    def had(self, count: int, now: float, *, waited: bool) -> None:
        """So many had their turn in a step. ``waited``: others did already at the one before."""
        if count and waited and self._last:
            each = (now - self._last) / count
            self._seconds += (each - self._seconds) / MEMORY_TURNS if self._seconds else each
        if count:
            self._last = now

    def seconds(self, waiting: int, now: float) -> float:
        """Until so many that wait have had theirs: as their prompts take, or as turns have come lately (which memory
        and rows decide as well), whichever is longer.

        What the prompts take is added up once for each ``now``: thousands of requests may be refused in one turn of the
        loop, each of them told this.
        """
        if now != self._prompts_at:
            self._prompts_at, self._prompts_seconds = now, self._pace.waiting_seconds()
        return max(self._prompts_seconds, waiting * self._seconds)
