"""The end of an instance: it admits nothing more, and reports when no request is left."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ...messages.control import Drain, Drained
from ..feature import Feature
from ..handlers import receives
from ..scheduler import Scheduler

log = logging.getLogger(__name__)


class DrainFeature(Feature):
    """Drains the instance once. ``all_read`` returns whether no message waits for a later tick."""

    def __init__(self, scheduler: Scheduler, all_read: Callable[[], bool]) -> None:
        self._scheduler = scheduler
        self._all_read = all_read
        self._is_reported = False

    @receives(Drain)
    def drain(self, message: Drain, now: float) -> None:
        """Admit no more requests, withdraw the registration, and migrate running requests to ``message.to`` where they
        can be.

        The others run to their end. ``tick`` reports when no request is left.
        """
        log.info("draining: %d requests are left", len(self._scheduler.reqs))
        self._scheduler.draining = True
        self._scheduler.handovers.membership.withdraw()
        self._scheduler.handovers.move_all(message.to)

    def tick(self, now: float) -> None:
        """Send ``Drained`` once, when the instance drains, no request is left and all messages are read."""
        # After all requests have ended, the result of a step under way has no reader: don't wait for it.
        scheduler = self._scheduler
        if scheduler.draining and not scheduler.reqs and self._all_read() and not self._is_reported:
            scheduler.outbox.answer(Drained())
            self._is_reported = True
            log.info("drained")

    def problem(self, now: float) -> str | None:
        """Return that the instance is draining, once a ``Drain`` message has come; None before."""
        return "the instance is draining" if self._scheduler.draining else None
