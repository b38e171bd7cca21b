"""Measures how fast the queue of waiting requests moves."""

from __future__ import annotations

MEMORY_TURNS = 32
"""Number of admissions over which the time between two of them is averaged."""


class QueueRate:
    """Average time between two admissions while requests wait.

    The clock starts at the last admission, or later when requests begin to wait. So idle time does not count.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        """Time from which the next admission is measured; None while no request waits."""
        self._seconds = 0.0

    def came(self, count: int, now: float, *, waited: bool) -> None:
        """Note that ``count`` requests, perhaps 0, were admitted at ``now``. Call this after each plan.

        ``waited``: whether further requests still wait. Only then does the time count for the average.
        """
        if count and waited and self._since is not None:
            each = (now - self._since) / count
            self._seconds += (each - self._seconds) / MEMORY_TURNS if self._seconds else each
        if not waited:
            self._since = None
        elif count or self._since is None:
            self._since = now

    def seconds(self, waiting: int) -> float:
        """Return the estimated seconds until ``waiting`` requests are admitted; 0 before an average is known."""
        return waiting * self._seconds
