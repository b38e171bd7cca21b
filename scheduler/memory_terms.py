"""What is said about KV memory: how large it is, what others need of it, until when it may be touched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..mem_cache.allocator import TokenToKVPoolAllocator
from ..mem_cache.req_to_token_pool import ReqToTokenPool
from ..messages.worker import WorkerReady
from ..runtime.metrics import Metrics, gauge


class PoolSizes(NamedTuple):
    """Tokens that the pools hold, ``window_tokens`` of them behind a window of ``window`` tokens; 0: there is none.

    ``most``: tokens that they have addresses for, and may grow to; as many ``window_tokens`` belong to that.
    """

    tokens: int
    window: int = 0
    window_tokens: int = 0
    most: int = 0

    @classmethod
    def of(cls, worker: WorkerReady) -> PoolSizes:
        """Those of a worker."""
        group = worker.layout.window_group
        window = group.window if group is not None else 0
        return cls(worker.max_total_tokens, window, worker.max_window_tokens, worker.limit_tokens)


class Reserve(NamedTuple):
    """What must stay obtainable for others: slots, pages to be promised behind windows, and request rows."""

    slots: int = 0
    window_pages: int = 0
    rows: int = 0

    def plus(self, other: Reserve) -> Reserve:
        """Both together."""
        return Reserve(self.slots + other.slots, self.window_pages + other.window_pages, self.rows + other.rows)


NO_RESERVE = Reserve()


class Fence(NamedTuple):
    """A step, copies between the tiers, and looks at pages (``kv_debug.py``), up to which what was planned may touch
    memory that was let go of.
    """

    step: int = 0
    copies: int = 0
    looks: int = 0


NO_FENCE = Fence()


def usage(allocator: TokenToKVPoolAllocator, cached: int, table: ReqToTokenPool) -> dict[str, int]:
    """Tokens: total now, most that it can become, free, ``cached`` (evictable), in use (more than the total where the
    pool has just become smaller than that), the same of window pages; rows: total, in use.
    """
    size, available, rows, windows = (
        allocator.page_size,
        allocator.available_size(),
        len(table.table),
        allocator.windows,
    )
    told = {
        "total": allocator.size,
        "most": allocator.most_pages * size,
        "free": max(0, available),
        "cached": cached,
        "in_use": allocator.size - available - cached,
        "rows_total": rows,
        "rows_in_use": rows - table.available_size(),
    }
    return told | (windows.usage() if windows is not None else {})


METRICS: Metrics[Mapping[str, int]] = (
    gauge("pdserve_kv_pool_size_tokens", "KV pool, in tokens.", lambda usage: usage["total"]),
    gauge(
        "pdserve_kv_pool_tokens",
        "KV pool by use: free, cached (no request needs it), in_use.",
        lambda usage: {state: usage[state] for state in ("free", "cached", "in_use")},
        "state",
    ),
    gauge(
        "pdserve_kv_pool_usage_ratio",
        "Share of the KV pool that requests need.",
        lambda usage: usage["in_use"] / usage["total"],
    ),
)
"""Metrics of what ``usage`` returns."""
