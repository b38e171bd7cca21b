"""Says how far a long piece of work has come, as log lines.

Not as a bar: the processes of an instance share one stderr, and each would draw over the others' lines. Lines also
reach those who read a log file, or ``pdserve up``, which reads its instances through pipes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

EVERY_SECONDS = 5.0
"""Work that takes less than this says nothing."""


class ProgressLog:
    """Counts to ``total`` (of any unit) and logs the percentage every ``EVERY_SECONDS``. For one thread."""

    def __init__(self, log: logging.Logger, what: str, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        """``what`` is done: "loading the weights". ``clock`` gives seconds."""
        self._log = log
        self._what = what
        self._total = total
        self._clock = clock
        self._done = 0
        self._begin = self._said_at = clock()

    def advance(self, amount: int) -> None:
        """So much more is done; the end itself is for others to log, who know what came of it."""
        self._done += amount
        now = self._clock()
        if now - self._said_at < EVERY_SECONDS or self._done >= self._total:
            return
        self._said_at = now
        self._log.info("%s: %.0f %% after %.0f s", self._what, 100 * self._done / self._total, now - self._begin)
