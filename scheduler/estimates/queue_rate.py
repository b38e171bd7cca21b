"""How fast the queue moves."""

from __future__ import annotations

MEMORY_TURNS = 32
"""The time between two turns is averaged over so many."""


class QueueRate:
    """Watches when requests get their turn, one after the other while others wait."""

    def __init__(self) -> None:
        self._last = 0.0
        self._seconds = 0.0

    def came(self, count: int, now: float, *, waited: bool) -> None:
        """So many had their turn in a step. ``waited``: others did already at the one before."""
        if count and waited and self._last:
            each = (now - self._last) / count
            self._seconds += (each - self._seconds) / MEMORY_TURNS if self._seconds else each
        if count:
            self._last = now

    def seconds(self, waiting: int) -> float:
        """Until so many that wait have had their turn, as turns have come lately."""
        return waiting * self._seconds
