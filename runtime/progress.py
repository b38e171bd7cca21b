"""Progress of long work, as log lines.

A progress bar would not do: the processes of an instance share one stderr, and each would overwrite the others' lines.
Lines also arrive in log files, and at ``pdserve up``, which reads its instances through pipes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

EVERY_SECONDS = 5.0
"""Work that takes less than this says nothing."""


class ProgressLog:
    """Counter up to ``total`` (of any unit), which logs the percentage every ``EVERY_SECONDS``. For one thread."""

    def __init__(self, log: logging.Logger, what: str, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Start counting. ``what`` names the work, like "loading the weights". ``clock`` returns seconds."""
        self._log = log
        self._what = what
        self._total = total
        self._clock = clock
        self._done = 0
        self._begin = self._logged_at = clock()

    def advance(self, amount: int) -> None:
        """Count ``amount`` more, and log the percentage if ``EVERY_SECONDS`` have passed since the last line.

        The end is not logged here: the caller logs it, because it knows the result.
        """
        self._done += amount
        now = self._clock()
        if now - self._logged_at < EVERY_SECONDS or self._done >= self._total:
            return
        self._logged_at = now
        self._log.info("%s: %.0f %% after %.0f s", self._what, 100 * self._done / self._total, now - self._begin)
