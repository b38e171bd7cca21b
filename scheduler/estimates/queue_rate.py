"""Measures how fast the queue of waiting requests moves."""

from __future__ import annotations

MEMORY_TURNS = 32
"""Number of admissions over which the time between two of them is averaged."""


class QueueRate:
    """Average time between two admissions while requests wait."""

    def __init__(self) -> None:
        self._last = 0.0
        self._seconds = 0.0

    def came(self, count: int, now: float, *, waited: bool) -> None:
        """Note that ``count`` requests were admitted at ``now``. ``waited``: whether further requests still wait.

        Only then does the time since the last admission count for the average.
        """
        if count and waited and self._last:
            each = (now - self._last) / count
            self._seconds += (each - self._seconds) / MEMORY_TURNS if self._seconds else each
        if count:
            self._last = now

    def seconds(self, waiting: int) -> float:
        """Return the estimated seconds until ``waiting`` requests are admitted; 0 before an average is known."""
        return waiting * self._seconds
