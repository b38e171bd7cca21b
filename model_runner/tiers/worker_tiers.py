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
from ...runtime.cluster_secret import ClusterSecretError, read_key_ring
from ..kv.pools import Pools
from ..options import WorkerOptions
from .host_pool import Bytes, HostPool
from .page_codec import make_codecs
from .store_engine import StoreEngine, StoreEvent

GB = 10**9
EmitStored = Callable[[StoreEvent], None]


def host_pages(options: WorkerOptions, num_pages: int, page_bytes: int) -> int:
    """Return the number of pages in the second tier, at least 1.

    It is set by ``hicache_size`` in GB, or else by ``hicache_ratio`` to the pool's ``num_pages``. ``page_bytes``: bytes
    of a page in the tier.
    """
    if options.hicache_size:
        return max(1, int(options.hicache_size * GB) // page_bytes)
    return max(1, int(options.hicache_ratio * num_pages))


def _bytes_of(pools: Pools, group: int) -> Bytes:
    """Return a view of a group's KV pool as bytes [pages, page_bytes]; [pages, 0] if its pages have no bytes.

    ``group``: index of the page group.
    """
    region = pools.regions[group]
    if region is None:
        return np.empty((pools.plan.num_pages, 0), dtype=np.uint8)
    return np.frombuffer(region.buffer, dtype=np.uint8).reshape(-1, pools.layout.groups[group].page_bytes)


class WorkerTiers:
    """Copies in the worker's own thread, between steps; everything else is the store's thread's."""

    def __init__(
        self, options: WorkerOptions, pools: Pools, device_type: str, make_emit: Callable[[], EmitStored]
    ) -> None:
        """Reserve the second tier's file, and start the store's thread if the options name a store.

        ``make_emit`` is called in this case, and returns a function by which the store's thread sends to the scheduler.
        Raises ``ModelError``.
        """
        if device_type != "cpu":
            raise UnsupportedModel(
                f"--enable-hierarchical-cache keeps KV of CPU memory alone as yet, and this is {device_type}'s"
            )
        codecs = make_codecs(options.hicache_host_dtype, pools.layout)
        self._pools = [_bytes_of(pools, group) for group in range(len(codecs))]
        page_bytes = sum(codec.nbytes for codec in codecs)
        folder = Path(options.hicache_folder) if options.hicache_folder else None
        self.num_pages = host_pages(options, pools.max_total_tokens // options.page_size, page_bytes)
        self._host = HostPool(self.num_pages, codecs, folder)
        self._store: StoreEngine | None = None
        if options.hicache_storage_backend is not None:
            try:
                store = make_store(
                    options.hicache_storage_backend,
                    options.storage_url,
                    page_bytes,
                    int(options.hicache_storage_size * GB),
                    options.hicache_storage_timeout,
                    read_key_ring("--hicache-storage-key-file", options.hicache_storage_key_file),
                )
            except (StoreMisconfigured, ClusterSecretError) as e:
                raise UnsupportedModel(str(e)) from e
            self._store = StoreEngine(store, self._host, make_emit()).start()

    def obey(self, command: TierCommand) -> PagesCopied | None:
        """Carry out a copy between pool and tier now, and return its answer; or queue a store command, and return None.

        The store's thread answers the latter. Raises ``RuntimeError`` without a store.
        """
        if isinstance(command, CopyPages):
            began = time.monotonic()
            self._host.copy(self._pools, unpack_i32(command.copies).reshape(-1, 3))
            return PagesCopied(command.id, time.monotonic() - began)
        if self._store is None:
            raise RuntimeError(f"an instance without a store was sent {type(command).__name__}")
        self._store.submit(command)
        return None
