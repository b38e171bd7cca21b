"""The circuit breaker of one instance: open while the instance asks for no requests, or after repeated failures.

closed ──503 with Retry-After, about the instance itself──▶ open for as long as it says
   └──``FAILURES`` failures in a row─────▶ open for 1 s, after the next failure 2 s, 4 s, …

It closes when that time is over. A success resets the count of failures, and leaves an open breaker open.

A 429 means load and opens no breaker, and neither does a deadline of the router's own. Failures of requests that ran at
the same time count once, because a crash ends all of them.

The fleet leaves out at most half of a role at a time (``Fleet.in_rotation``). An instance that is left out is still
tried if no other can serve. Health checks find out whether an instance is there at all. The breaker is for one that
answers them and fails its requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable

FAILURES = 5
LONGEST = 60.0
"""Maximum seconds that a breaker stays open, even if an instance asks for more."""


class CircuitBreaker:
    """Circuit breaker of one instance. Times are those of ``clock``, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._failed_at = -1.0
        self._until = 0.0
        self.opened_at = 0.0
        """Time at which the breaker opened last."""

    @property
    def seconds_left(self) -> float:
        """Seconds until the breaker closes; 0: it is closed."""
        return max(0.0, self._until - self._clock())

    def __bool__(self) -> bool:
        return self._until > 0 and self.seconds_left > 0  # no clock is read for the many that never opened

    def succeeded(self) -> None:
        """Note that the instance served a request: reset the count of failures in a row. An open breaker stays open."""
        self._failures = 0

    def failed(self, begun_at: float) -> None:
        """Count a failure of a request that was sent at ``begun_at``, and that another instance might have served.

        The ``FAILURES``-th failure in a row opens the breaker for 1 s, and each further one for twice as long. A
        request that was sent before the last counted failure does not count.
        """
        if begun_at <= self._failed_at:
            return
        self._failures += 1
        self._failed_at = self._clock()
        if self._failures >= FAILURES:
            self.ask(2.0 ** min(self._failures - FAILURES, 10))

    def ask(self, seconds: float) -> None:
        """Open the breaker for ``seconds`` from now, ``LONGEST`` at most, so that other instances get the requests.

        A breaker that is open longer already stays open as long.
        """
        now = self._clock()
        if self._until <= now:
            self.opened_at = now
        self._until = max(self._until, now + min(seconds, LONGEST))

    def forget(self) -> None:
        """Close the breaker and forget all failures: the instance has come back, perhaps as another process."""
        self._failures, self._until = 0, 0.0
