"""How short KV memory is, in one word for dashboards, alarms and load balancers.

=====  =================================================================================================
none   a quarter of the pool or more can be had (free, or cached and not in use)
some   less than a quarter, or a request was retracted within the last minute
high   a request was retracted within the last ten seconds, or requests wait while a sixteenth is left
=====  =================================================================================================

Where layers have windows, the pool with the smaller share left counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from ...messages.metrics import Family
from ...runtime.metrics import Metrics, gauge, one_of, read
from ..feature import Feature
from ..kv_pool import KVPool
from ..planner import StepPlanner

SOME_SHARE, HIGH_SHARE = 1 / 4, 1 / 16
SOME_SECONDS, HIGH_SECONDS = 60.0, 10.0


class Pressure(StrEnum):
    """Level of memory pressure; the module defines the levels."""

    NONE = "none"
    SOME = "some"
    HIGH = "high"


def pressure(left: float, waiting: int, since_retraction: float) -> Pressure:
    """Return how short KV memory is: none, some or high.

    ``left``: share of the pool that is free or cached. ``waiting``: number of requests without memory.
    ``since_retraction``: seconds since the last retraction, infinity for never.
    """
    if since_retraction < HIGH_SECONDS or (waiting and left < HIGH_SHARE):
        return Pressure.HIGH
    if since_retraction < SOME_SECONDS or left < SOME_SHARE:
        return Pressure.SOME
    return Pressure.NONE


def share_left(usage: Mapping[str, int]) -> float:
    """Return the share of the pool that is free or cached, from ``KVPool.usage``.

    For a model with windowed layers it is the smaller one of this share and that of window pages.
    """
    left = (usage["free"] + usage["cached"]) / usage["total"]
    if not usage.get("window_total"):
        return left
    return min(left, (usage["window_free"] + usage["window_cached"]) / usage["window_total"])


class PressureMeter(Feature):
    """Measures memory pressure, and remembers the time of the last retraction."""

    def __init__(self, pool: KVPool, planner: StepPlanner) -> None:
        self._pool = pool
        self._planner = planner
        self._retractions = 0
        self._at = -math.inf

    def tick(self, now: float) -> None:
        """Note retractions since the last tick; ``now``: ``time.monotonic()``."""
        count = self._planner.retraction.count
        if count != self._retractions:
            self._retractions, self._at = count, now

    def status(self, now: float) -> dict[str, Any]:
        """Return ``pressure``: the current level, ``none``, ``some`` or ``high``."""
        return {"pressure": self.level(now)}

    def metrics(self, now: float) -> list[Family]:
        """Return ``pdserve_kv_pressure``: 1 for the current level and 0 for the other two."""
        return read(METRICS, self.level(now))

    def level(self, now: float) -> Pressure:
        """Return how short KV memory is at ``now``: none, some or high, as the module defines them.

        A retraction raises the level for up to a minute.
        """
        return pressure(share_left(self._pool.usage()), len(self._planner.waiting), now - self._at)


METRICS: Metrics[Pressure] = (
    gauge(
        "pdserve_kv_pressure",
        "1 at the level of how short KV memory is: none, some (under a quarter can be had), high.",
        lambda level: one_of(level, Pressure),
        "level",
        note="The same as [`pressure`](http-api.md#get-server_info).",
    ),
)
