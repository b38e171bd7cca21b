"""A simulated instance with all tiers: the real host memory, and the real store's code without its thread.

The worker carries out copies in order, between its steps. Commands to the store wait in ``store_queue`` until the test
serves them (``serve_store``). Meanwhile the store may die, forget pages or return wrong ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from pdserve.mem_cache.storage.base import PageStore, StoreUnavailable, StoreUsage
from pdserve.mem_cache.storage.frame import HEADER_BYTES, BadFrame, check, header
from pdserve.messages.base import Message, unpack_i32
from pdserve.messages.tiers import CopyPages, DropPages, FetchPages, FindPages, KeepPages, PagesCopied, StorePages
from pdserve.model_runner.tiers.host_pool import HostPool
from pdserve.model_runner.tiers.page_codec import AsItIs
from pdserve.model_runner.tiers.store_engine import StoreEngine

from .sim import NO_WINDOW, SimInstance, SimWindow, make_options


class MemoryStore(PageStore):
    """Frames in a dict, which outlives instances, and which tests may spoil."""

    def __init__(self, page_bytes: int, kept: dict[bytes, bytes] | None = None) -> None:
        super().__init__(page_bytes)
        self.kept = {} if kept is None else kept
        self.dead = False
        self.bad = 0

    def _ask(self) -> None:
        if self.dead:
            raise StoreUnavailable("dead")

    def exists(self, hashes: Sequence[bytes]) -> int:
        self._ask()
        return next((i for i, h in enumerate(hashes) if h not in self.kept), len(hashes))

    def get(self, hashes: Sequence[bytes], into: Sequence[memoryview]) -> int:
        self._ask()
        for i, (page_hash, view) in enumerate(zip(hashes, into, strict=True)):
            framed = self.kept.get(page_hash)
            if framed is None:
                return i
            try:
                page = memoryview(framed)[HEADER_BYTES:]
                check(framed[:HEADER_BYTES], page_hash, page)
            except BadFrame:
                self.bad += 1
                del self.kept[page_hash]
                return i
            view[:] = page
        return len(hashes)

    def set(self, hashes: Sequence[bytes], pages: Sequence[memoryview]) -> None:
        self._ask()
        for page_hash, page in zip(hashes, pages, strict=True):
            self.kept[page_hash] = header(page_hash, page) + bytes(page)

    def remove(self, hashes: Sequence[bytes]) -> None:
        self._ask()
        for page_hash in hashes:
            self.kept.pop(page_hash, None)

    def probe(self) -> None:
        self._ask()

    def keep(self, hashes: Sequence[bytes], until: float) -> int:
        return self.exists(hashes)

    def usage(self) -> StoreUsage:
        return StoreUsage(len(self.kept), None, self.bad, 0)

    def close(self) -> None:
        pass


StoreMessage = StorePages | FetchPages | FindPages | DropPages | KeepPages


class Tiered(SimInstance):
    """An instance that has tiers from ``add_tiers`` on. ``compute_ms``: what computing a prompt is expected to take."""

    compute_ms = 1e9

    def add_tiers(self, host_pages: int, kept: dict[bytes, bytes] | None) -> None:
        """Add a second tier of ``host_pages``. ``kept``: the store's pages from before; None: no page."""
        # Simulated steps take no time: nothing that a store brings would be worth waiting for.
        self.scheduler.estimator.compute_ms = lambda req, tokens: self.compute_ms  # type: ignore[method-assign]
        page_bytes = self.options.page_size * 8
        self.pools = [pool.view(np.uint8).reshape(-1, page_bytes) for pool in self.worker.pools()]
        self.host = HostPool(host_pages, [AsItIs(page_bytes)] * len(self.pools), None)
        self.store = MemoryStore(page_bytes * len(self.pools), kept)
        self.store_queue: deque[StoreMessage] = deque()
        self.engine = StoreEngine(self.store, self.host, self._on_store_event, clock=lambda: self.now)

    @property
    def tiers(self):
        return self.scheduler.tiers

    def on_command(self, message: Message) -> None:
        if isinstance(message, CopyPages):
            self.host.copy(self.pools, unpack_i32(message.copies).reshape(-1, 3))
            self.tiers.on_event(PagesCopied(message.id, 0.0), self.now)
        elif isinstance(message, StoreMessage):
            self.store_queue.append(message)
        else:
            super().on_command(message)

    def serve_store(self) -> bool:
        """Let the store do the oldest thing that it was asked; False where there is none. A dead one is tried again
        when that is due.
        """
        if self.engine.probe_in == 0.0:
            self.engine.probe()
            return True
        if not self.store_queue:
            return False
        self.engine.obey(self.store_queue.popleft())
        return True

    def _on_store_event(self, event) -> None:
        self.tiers.on_event(event, self.now)


class TieredSim(Tiered):
    """See ``Tiered``."""

    def __init__(
        self,
        host_pages: int = 24,
        kept: dict[bytes, bytes] | None = None,
        store: bool = True,
        window: SimWindow = NO_WINDOW,
        **options,
    ):
        given = {
            "enable_hierarchical_cache": True,
            "hicache_storage_backend": "file" if store else None,
            "hicache_storage_prefetch_policy": "wait_complete",
        }
        super().__init__(make_options(**(given | options)), host_pages=host_pages, window=window)
        self.add_tiers(host_pages, kept)

    def settle(self) -> None:
        """Turn until nothing is left to do, for the store neither."""
        for _ in range(10_000):
            self.plan()
            self.scheduler.check_invariants()
            if not self.work() and not self.serve_store() and self.scheduler.is_idle:
                self.now += 1.0
                return
        raise AssertionError(f"not idle: {self.scheduler.reqs}")
