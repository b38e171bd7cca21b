"""The circuit breaker of a store. It opens after failures in a row, for seconds that double with each further one.

CLOSED (asked) → after ``FAILURES`` in a row OPEN (not asked) → when its time is over HALF_OPEN (asked once) → CLOSED,
or OPEN for twice as long. No request waits for a store that is not asked: its pages count as missing.
"""

from __future__ import annotations

from enum import StrEnum

FAILURES = 3
FIRST_SECONDS = 1.0
MOST_SECONDS = 60.0


class BreakerState(StrEnum):
    """State of the circuit breaker; the module shows the transitions."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """Circuit breaker of one store. Times are ``time.monotonic()``."""

    def __init__(self) -> None:
        self._failures = 0
        self._seconds = FIRST_SECONDS
        self._until = 0.0
        self.trips = 0
        """How often it opened."""
        self.reason = ""
        """The failure that opened it last."""

    def state(self, now: float) -> BreakerState:
        """Return the state at ``now``. The store may be asked unless it is OPEN."""
        if self._failures < FAILURES:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._until else BreakerState.HALF_OPEN

    def probe_in(self, now: float) -> float | None:
        """Return the seconds until the store may be tried again, 0: now; None while the breaker is closed."""
        return max(0.0, self._until - now) if self._failures >= FAILURES else None

    def succeeded(self) -> None:
        """Note that the store has answered: close the breaker, and forget earlier failures."""
        self._failures, self._seconds = 0, FIRST_SECONDS

    def failed(self, reason: str, now: float) -> None:
        """Note that the store failed, or did not answer in time, for ``reason``.

        ``FAILURES`` in a row open the breaker. One failure while it is HALF_OPEN opens it again, for twice as long.
        """
        was = self.state(now)
        self._failures += 1
        if self.state(now) is BreakerState.CLOSED or was is BreakerState.OPEN:
            return
        if was is BreakerState.HALF_OPEN:
            self._seconds = min(2 * self._seconds, MOST_SECONDS)
        self._until, self.reason = now + self._seconds, reason
        self.trips += 1
