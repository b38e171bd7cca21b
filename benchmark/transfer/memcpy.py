"""The bound of what one core can do: the same bytes copied, and hashed, within one process."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from ...disaggregation.transfer.page_check import Landed, PageCheck
from ...disaggregation.transfer.page_pool import PagePool
from ...disaggregation.transfer.received_pages import CHECK_BYTES
from ...mem_cache.kv_pages.page_group import PageGroup, neighbour_spans
from ...messages.base import I32
from ...messages.worker import SliceChecksum
from .engine_sides import HANDOVER
from .sides import Moving, Pools, Writer


class MemcpyWriter(Writer):
    """Has no owner, and hashes as an engine does, without being one; whatever the checksum is."""

    def __init__(self, pools: Pools) -> None:
        self._source = np.frombuffer(pools.source.buffer, np.uint8)
        self._destination = np.frombuffer(pools.destination.buffer, np.uint8)
        self._pool = PagePool(PageGroup(pools.destination, pools.page_bytes), 0, pools.destination.view())
        self._page_bytes = pools.page_bytes

    def move(self, src: I32, dst: I32, *, hashed: bool) -> Moving:
        began = time.perf_counter()
        local, remote = neighbour_spans(src, dst, self._page_bytes)
        for (source, length), target in zip(local.tolist(), remote[:, 0].tolist(), strict=True):
            self._destination[target : target + length] = self._source[source : source + length]
        return Moving(time.perf_counter() - began)

    def verify(self, pages: I32, slices: Sequence[SliceChecksum]) -> float:
        began = time.perf_counter()
        check = PageCheck(HANDOVER, [Landed(0, self._pool, pages)], [SliceChecksum(0, len(pages), 0, 1, 0)])
        while check.step(CHECK_BYTES) is None:
            continue
        return time.perf_counter() - began
