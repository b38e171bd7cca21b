"""The circuit breaker of one instance: open while the instance asks to be left alone, or fails again and again.

closed ──503 with Retry-After, about the instance itself──▶ open for as long as it says
   └──``FAILURES`` failures in a row─────▶ open for 1 s, after the next failure 2 s, 4 s, … ──success──▶ closed

A 429 tells of load and opens no breaker; nor does a deadline of the router's own. Failures of requests that ran beside
each other are one: a crash takes all of them. The fleet leaves out at most half of a role at a time
(``Fleet.in_rotation``), and an instance that is left out is still tried where no other can serve. Whether an instance
is there at all, its health checks say; this is about one that answers them and fails its requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable

FAILURES = 5
LONGEST = 60.0
"""Seconds, also where an instance asks for more."""


class Rest:
    """One instance's. Times are those of ``clock``, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._failed_at = -1.0
        self._until = 0.0
        self.opened_at = 0.0
        """When the breaker opened last."""

    @property
    def seconds_left(self) -> float:
        """For how long it is spared yet; 0: it is not."""
        return max(0.0, self._until - self._clock())

    def __bool__(self) -> bool:
        return self.seconds_left > 0

    def succeeded(self) -> None:
        """It served a request. What it asked for itself still holds."""
        self._failures = 0

    def failed(self, begun_at: float) -> None:
        """It didn't serve one that was sent at ``begun_at``, and another instance might have."""
        if begun_at <= self._failed_at:
            return
        self._failures += 1
        self._failed_at = self._clock()
        if self._failures >= FAILURES:
            self.ask(2.0 ** min(self._failures - FAILURES, 10))

    def ask(self, seconds: float) -> None:
        """It asks to be left alone for so long."""
        now = self._clock()
        if self._until <= now:
            self.opened_at = now
        self._until = max(self._until, now + min(seconds, LONGEST))

    def forget(self) -> None:
        """It was away and came back, perhaps as another process."""
        self._failures, self._until = 0, 0.0
