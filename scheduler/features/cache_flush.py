"""``POST /flush_cache``: drops the prefix cache of an idle instance."""

from __future__ import annotations

from ...messages.control import FlushCacheReq, FlushCacheResult
from ...messages.question import RefusedAnswer
from ..feature import Feature
from ..handlers import answers
from ..scheduler import Scheduler


class CacheFlush(Feature):
    """Flushes of the prefix cache."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    @answers(FlushCacheReq)
    def flush(self, question: FlushCacheReq, now: float) -> FlushCacheResult | RefusedAnswer:
        """Drop every cached prefix, unless requests are running."""
        if running := len(self._scheduler.reqs):
            return RefusedAnswer(400, f"{running} requests are running; flush when the instance is idle")
        return FlushCacheResult(self._scheduler.memory.flush())
