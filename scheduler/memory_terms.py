"""Terms of KV memory: its size, what others need of it, and until when it may be touched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..mem_cache.allocator import TokenToKVPoolAllocator
from ..mem_cache.req_to_token_pool import ReqToTokenPool
from ..messages.worker import WorkerReady
from ..runtime.metrics import Metrics, gauge


class PoolSizes(NamedTuple):
    """Sizes of the pools in tokens: ``tokens``, and ``window_tokens`` for layers with a window of ``window`` tokens (0:
    none).

    ``most``: tokens for which addresses are reserved, so the pool may grow to it. ``window_tokens`` belongs to that
    size.
    """

    tokens: int
    window: int = 0
    window_tokens: int = 0
    most: int = 0

    @classmethod
    def of(cls, worker: WorkerReady) -> PoolSizes:
        """Return the sizes of the pools that a worker reports."""
        group = worker.layout.window_group
        window = group.window if group is not None else 0
        return cls(worker.max_total_tokens, window, worker.max_window_tokens, worker.limit_tokens)


class Reserve(NamedTuple):
    """Memory that must stay obtainable for others: slots, window pages and request rows."""

    slots: int = 0
    window_pages: int = 0
    rows: int = 0

    def plus(self, other: Reserve) -> Reserve:
        """Return the sum of both."""
        return Reserve(self.slots + other.slots, self.window_pages + other.window_pages, self.rows + other.rows)


NO_RESERVE = Reserve()


class Fence(NamedTuple):
    """Latest work that may touch released memory: a step, copies between the tiers, hash checks (``kv_debug.py``)."""

    step: int = 0
    copies: int = 0
    looks: int = 0


NO_FENCE = Fence()


def usage(allocator: TokenToKVPoolAllocator, cached: int, table: ReqToTokenPool) -> dict[str, int]:
    """Return the use of the pools in tokens, and of the request rows in requests.

    Keys: ``total`` (size now), ``most`` (size it can become), ``free``, ``cached`` (evictable), ``in_use``; likewise
    for window pages; ``rows_total`` and ``rows_in_use``. More than the total may be in use just after the pool was made
    smaller.
    """
    size, available, rows, windows = (
        allocator.page_size,
        allocator.available_size(),
        len(table.table),
        allocator.windows,
    )
    terms = {
        "total": allocator.size,
        "most": allocator.most_pages * size,
        "free": max(0, available),
        "cached": cached,
        "in_use": allocator.size - available - cached,
        "rows_total": rows,
        "rows_in_use": rows - table.available_size(),
    }
    return terms | windows.usage()


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
