"""The tiers of KV memory as a part of the loop: their events, their figures and their problems."""

from __future__ import annotations

import math
from typing import Any

from ...messages.metrics import Family
from ...messages.tiers import PagesCopied, PagesFetched, PagesFound, PagesKept, PagesStored, StoreState, TierEvent
from ..feature import Feature
from ..handlers import receives
from ..tiers import Tiers


class TierFeature(Feature):
    """The tiers behind the pool, if there are some."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers

    @receives(PagesCopied, PagesStored, PagesFetched, PagesFound, PagesKept, StoreState)
    def on_event(self, event: TierEvent, now: float) -> None:
        """Pass the worker's report on host memory or the KV store on to the tiers."""
        self._tiers.on_event(event, now)

    def seconds_left(self, now: float) -> float:
        """Return the seconds until the KV store's next deadline or retry; infinity if there is none, or no store."""
        seconds = self._tiers.store.timeout(now)
        return math.inf if seconds is None else seconds

    def status(self, now: float) -> dict[str, Any]:
        """Return ``tiers``: pages in host memory, the store's state and counts; None for an instance without tiers."""
        return {"tiers": self._tiers.info()}

    def metrics(self, now: float) -> list[Family]:
        """Return the metrics of the host tier and the KV store; none for an instance without tiers."""
        return self._tiers.metrics()

    def warning(self, now: float) -> str | None:
        """Return that the KV store is silent, paused after failures or refuses pages; None if it works or is unused."""
        return self._tiers.store.problem(now) or None
