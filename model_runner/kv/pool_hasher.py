"""Looks at pages of a model's pools, between its steps, where ``--kv-debug`` wants to know what they hold."""

from __future__ import annotations

from functools import partial

import numpy as np

from ...mem_cache.kv_pages.staging import Piece
from ...messages.kv_debug import HashPages, PagesHashed
from ..device.base import Device
from .page_hasher import Bytes, PageHasher
from .pools import Pools


class NoPoolHasher:
    """The hasher of an instance without ``--kv-debug``: it is asked for nothing."""

    def obey(self, command: HashPages) -> PagesHashed:
        """Raise ``RuntimeError``: without ``--kv-debug`` the scheduler must not ask for hashes."""
        raise RuntimeError("an instance without --kv-debug was asked to hash pages")


class PoolHasher:
    """Hashes pages. Of ranks that share a pool, one does for all: a page is all of theirs."""

    def __init__(self, pools: Pools, device: Device) -> None:
        self._pools = pools
        self._device = device
        self._hashers = [PageHasher(pools.layout, group) for group in range(len(pools.layout.groups))]
        self._host: dict[int, Bytes] = {}
        """A page of a device's pool at a time, by group."""

    def obey(self, command: HashPages) -> PagesHashed:
        """Wait for all work queued on the device, then hash the command's pages and return the answer.

        The answer names the order that was hashed: "tokens", or the pool's own if pages can't be converted.
        """
        self._device.synchronize()
        hashes = [
            hasher.hash_all(pages, partial(self._page, group))
            for group, (hasher, pages) in enumerate(zip(self._hashers, command.pages, strict=True))
        ]
        is_canonical = all(hasher.is_canonical for hasher in self._hashers)
        return PagesHashed(command.id, hashes, "tokens" if is_canonical else self._pools.layout.order)

    def _page(self, group: int, page: int) -> Bytes:
        pools, nbytes = self._pools, self._pools.layout.groups[group].page_bytes
        region = pools.regions[group]
        if not nbytes:
            return np.empty(0, dtype=np.uint8)  # its pages are mere numbers
        if region is not None:
            return np.frombuffer(region.buffer, dtype=np.uint8, count=nbytes, offset=page * nbytes)
        # Pages of a device, which torch reads.
        import torch

        from .staging import PoolPages

        host = self._host.get(group)
        if host is None:
            host = self._host[group] = self._device.host_zeros((nbytes,), torch.uint8).numpy()
        PoolPages(pools.tensors[group], self._device).read([Piece(page * nbytes, memoryview(host.data))])
        return host
