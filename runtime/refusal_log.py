"""Says what was refused without letting strangers fill the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ..messages.decode import shown

LINES = 10
SECONDS = 10.0


class RefusalLog:
    """Log of refusals: ``total`` counts all, at most ``LINES`` are logged in ``SECONDS``, then a count of the rest.

    There is no quota per sender: a flood comes from many addresses, and a table of them would grow.
    """

    def __init__(
        self,
        log: logging.Logger,
        what: str,
        level: int = logging.WARNING,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._what = what
        self._level = level
        self._clock = clock
        self._until = 0.0
        self._lines = 0
        self._suppressed = 0
        self.total = 0

    def add(self, reason: str) -> None:
        """Count a refusal, and log ``reason`` unless there were too many lines lately.

        It may contain untrusted text.
        """
        self.total += 1
        now = self._clock()
        if now >= self._until:
            if self._suppressed:
                self._log.log(
                    self._level, "%s: %d more like these, %d in all", self._what, self._suppressed, self.total
                )
            self._until, self._lines, self._suppressed = now + SECONDS, 0, 0
        if self._lines < LINES:
            self._lines += 1
            self._log.log(self._level, "%s: %s", self._what, shown(reason))
        else:
            self._suppressed += 1


class LogQuota(logging.Filter):
    """Lets at most ``LINES`` records through in ``SECONDS``, for a logger of others that strangers can make speak.

    The first one after a flood says how many were dropped.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._until = 0.0
        self._passed = 0
        self._dropped = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is to be logged.

        The first one after a flood gets a note of how many were dropped.
        """
        now = self._clock()
        if now >= self._until:
            if self._dropped:
                record.msg = f"({self._dropped} more like the last ones were not logged) {record.msg}"
            self._until, self._passed, self._dropped = now + SECONDS, 0, 0
        self._passed += 1
        if self._passed <= LINES:
            return True
        self._dropped += 1
        return False


def limit_foreign_logs() -> None:
    """Limit the log lines of uvicorn and asyncio, which write a traceback for whatever a connection does to them."""
    for name in ("uvicorn.error", "asyncio"):
        logger = logging.getLogger(name)
        if not any(isinstance(f, LogQuota) for f in logger.filters):
            logger.addFilter(LogQuota())
