"""Recent failures of one instance, which count as load.

An instance that refuses or fails requests at once never has many, so it looks idle. A policy that prefers idle
instances would send it all requests. So each failure counts as running requests for some time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

HALF_LIFE = 5.0
"""Seconds in which the count halves."""
NEGLIGIBLE = 0.05
"""A count below it becomes 0."""


class RecentFailures:
    """Count of recent failures, of which older ones weigh less. Times are those of ``clock``, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._count = 0.0
        self._counted_at = 0.0

    def add(self) -> None:
        """Count a failure now."""
        self._count = self.count + 1.0
        self._counted_at = self._clock()

    @property
    def count(self) -> float:
        """The count now. A single failure counts as 1 at first, as 0.5 after ``HALF_LIFE`` seconds, and so on."""
        if not self._count:
            return 0.0  # no clock is read for the many without failures
        left = self._count * math.exp2((self._counted_at - self._clock()) / HALF_LIFE)
        if left < NEGLIGIBLE:
            self._count = 0.0
            return 0.0
        return left

    def forget(self) -> None:
        """Forget all failures: the instance has come back, perhaps as another process."""
        self._count = 0.0
