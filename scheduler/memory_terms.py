"""What is said about KV memory: how large it is, what others need of it, until when it may be touched."""

from __future__ import annotations

from typing import NamedTuple

from ..messages.worker import WorkerReady


class PoolSizes(NamedTuple):
    """Tokens that the pools hold, ``window_tokens`` of them behind a window of ``window`` tokens; 0: there is none."""

    tokens: int
    window: int = 0
    window_tokens: int = 0

    @classmethod
    def of(cls, worker: WorkerReady) -> PoolSizes:
        """Those of a worker."""
        group = worker.layout.window_group
        return cls(worker.max_total_tokens, group.window if group is not None else 0, worker.max_window_tokens)


class Reserve(NamedTuple):
    """What must stay obtainable for others: slots, and pages to be promised behind windows."""

    slots: int = 0
    window_pages: int = 0


NO_RESERVE = Reserve()


class Fence(NamedTuple):
    """A step, copies between the tiers, and looks at pages (``kv_debug.py``), up to which what was planned may touch
    memory that was let go of.
    """

    step: int = 0
    copies: int = 0
    looks: int = 0


NO_FENCE = Fence()
