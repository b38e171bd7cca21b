"""``POST /flush_cache``: drops the prefix cache of an idle instance."""

from __future__ import annotations

from collections.abc import Mapping

from ...messages.control import FlushCacheReq, FlushCacheResult
from ...messages.question import RefusedAnswer
from ..feature import Feature
from ..handlers import answers
from ..kv_memory import KVMemory
from ..req import Req


class CacheFlush(Feature):
    """Flushes of the prefix cache. ``reqs``: the requests that have not ended, by rid."""

    def __init__(self, memory: KVMemory, reqs: Mapping[str, Req]) -> None:
        self._memory = memory
        self._reqs = reqs

    @answers(FlushCacheReq)
    def flush(self, question: FlushCacheReq, now: float) -> FlushCacheResult | RefusedAnswer:
        """Drop every cached prefix, and return how many tokens were dropped.

        Refuse with 400 while any request is live, running or queued.
        """
        if running := len(self._reqs):
            return RefusedAnswer(400, f"{running} requests are running; flush when the instance is idle")
        return FlushCacheResult(self._memory.flush())
