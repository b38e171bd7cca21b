"""The worker's side of the tiers behind the KV pool: host memory, and a store with its thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ...mem_cache.storage.base import StoreMisconfigured
from ...mem_cache.storage.registry import make_store
from ...messages.base import unpack_i32
from ...messages.tiers import CopyPages, PagesCopied, TierCommand
from ...model_files.errors import UnsupportedModel
from ...runtime.options import ServerOptions
from ..model_runner import ModelRunner
from .host_pool import HostPool
from .store_engine import StoreEngine, StoreEvent

GB = 10**9
EmitStored = Callable[[StoreEvent], None]


def host_pages(options: ServerOptions, num_pages: int, page_bytes: int) -> int:
    """How many pages the second tier has beside a pool of ``num_pages``."""
    if options.hicache_size:
        return max(1, int(options.hicache_size * GB) // page_bytes)
    return max(1, int(options.hicache_ratio * num_pages))


class WorkerTiers:
    """Copies in the worker's own thread, between steps; everything else is the store's thread's."""

    def __init__(self, options: ServerOptions, model: ModelRunner, make_emit: Callable[[], EmitStored]) -> None:
        """``make_emit``: a way to the scheduler for another thread. Raises ``ModelError``."""
        if model.kv_region is None:
            raise UnsupportedModel(
                f"--enable-hierarchical-cache keeps KV of CPU memory alone as yet, and this is {model.device.type}'s"
            )
        page_bytes = model.layout.page_bytes
        self._pool = np.frombuffer(model.kv_region.buffer, dtype=np.uint8).reshape(-1, page_bytes)
        folder = Path(options.hicache_folder) if options.hicache_folder else None
        self.num_pages = host_pages(options, len(self._pool) - 1, page_bytes)
        self._host = HostPool(self.num_pages, page_bytes, folder)
        self._store: StoreEngine | None = None
        if options.hicache_storage_backend is not None:
            try:
                store = make_store(
                    options.hicache_storage_backend,
                    options.hicache_storage_url,
                    page_bytes,
                    int(options.hicache_storage_size * GB),
                    options.hicache_storage_timeout,
                )
            except StoreMisconfigured as e:
                raise UnsupportedModel(str(e)) from e
            self._store = StoreEngine(store, self._host, make_emit()).start()

    def obey(self, command: TierCommand) -> PagesCopied | None:
        """One command; its answer, where it is done already."""
        if isinstance(command, CopyPages):
            began = time.monotonic()
            self._host.copy(self._pool, unpack_i32(command.copies).reshape(-1, 3))
            return PagesCopied(command.id, time.monotonic() - began)
        if self._store is None:
            raise RuntimeError(f"an instance without a store was sent {type(command).__name__}")
        self._store.submit(command)
        return None
