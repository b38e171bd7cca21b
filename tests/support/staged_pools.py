"""Pools that the transfer engine must reach through host memory, as those on a device; their memory is the host's."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pdserve.disaggregation.transfer.engine import TransferEngine
from pdserve.mem_cache.kv_pages.direct import DeviceMemory, Direct
from pdserve.mem_cache.kv_pages.page_group import PageGroup
from pdserve.mem_cache.kv_pages.region import HostMemory, KVRegion
from pdserve.mem_cache.kv_pages.staging import SCRATCH_BYTES, Part, Piece, Slabs, Staging
from pdserve.mem_cache.kv_pages.word_sum import host_checksum
from pdserve.messages.worker import KVGroup
from support.machine import limit


class PretendedDevice:
    """Copies when it is told to, and stops before the ``gate`` where there is one. ``writes``: bytes of each call.

    ``has_sums``: whether it has a kernel for checksums. ``sums``: pages of each call.
    """

    def __init__(self, pool: np.ndarray) -> None:
        self._pages = pool
        self.bytes = pool.reshape(-1)
        self.writes: list[int] = []
        self.reads: list[int] = []
        self.has_sums = True
        self.sums: list[int] = []
        self.reached = threading.Event()
        self.gate: threading.Event | None = None

    @property
    def nbytes(self) -> int:
        return self.bytes.nbytes

    @property
    def address(self) -> int:
        return self.bytes.ctypes.data

    def read(self, pieces: Sequence[Piece]) -> None:
        self.reads.append(sum(len(memory) for _, memory in pieces))
        for at, memory in pieces:
            memory[:] = self.bytes[at : at + len(memory)].data

    def word_sums(self, parts: Sequence[Part], num_layers: int) -> list[int]:
        assert self.has_sums
        self.sums.append(sum(len(part.pages) for part in parts))
        pages = self._pages.reshape(len(self._pages), num_layers, -1)
        data = (pages[part.pages, part.begin : part.end] for part in parts)
        return [host_checksum(np.ascontiguousarray(each).reshape(-1)) for each in data]

    def write(self, pieces: Sequence[Piece]) -> None:
        self.writes.append(sum(len(memory) for _, memory in pieces))
        if self.gate is not None:
            self.reached.set()
            assert self.gate.wait(limit(20))
        for at, memory in pieces:
            self.bytes[at : at + len(memory)] = np.frombuffer(memory, np.uint8)


def slabs_of(count: int, slab_bytes: int) -> Slabs:
    """Make ``count`` slabs."""
    return Slabs(memoryview(bytearray(count * slab_bytes + min(SCRATCH_BYTES, slab_bytes - 1))), slab_bytes)


def staged_group(pool: np.ndarray, slots: int, slabs: Slabs, kept: KVGroup | None = None) -> PageGroup:
    """Make the group of ``pool`` [pages, page_bytes]. Pages have one layer unless ``kept`` says otherwise."""
    page_bytes = pool.shape[1]
    region = HostMemory(memoryview(bytearray((slots + 1) * page_bytes)))
    staging = Staging(PretendedDevice(pool), slabs)
    return PageGroup(region, page_bytes, staging=staging) if kept is None else PageGroup.of(kept, region, staging)


def direct_group(pool: np.ndarray, kept: KVGroup | None = None, ordinal: int = 0, window: int = 0) -> PageGroup:
    """Make the group of ``pool`` [pages, page_bytes], where it lies. The window has a page and ``window`` bytes."""
    page_bytes, device = pool.shape[1], PretendedDevice(pool)
    direct = Direct(device, memoryview(bytearray(page_bytes + window)), ordinal)
    region = DeviceMemory(device)
    return PageGroup(region, page_bytes, direct=direct) if kept is None else PageGroup.of(kept, region, direct=direct)


def pool_group(
    kind: str, region: KVRegion, page_bytes: int, num_layers: int = 1, kept: KVGroup | None = None
) -> PageGroup:
    """Make the group of a whole ``region``, as the backend ``kind`` takes it."""
    if kind != "cuda_ipc":
        return PageGroup(region, page_bytes, num_layers) if kept is None else PageGroup.of(kept, region)
    group = direct_group(np.frombuffer(region.buffer, np.uint8).reshape(-1, page_bytes), kept, window=100)
    return replace(group, num_layers=num_layers) if kept is None else group


def held(engine: TransferEngine) -> int:
    """Count the slots and slabs of an engine that are in use. Call it only while nothing happens."""
    pools = [pool for pool in engine._pools.pools if pool is not None and pool.group.staging is not None]
    slots = sum(pool.slots.count - pool.slots.free for pool in pools if pool.slots is not None)
    slabs = [pool.group.staging.slabs for pool in pools[:1] if pool.group.staging is not None]
    return slots + sum(one.count - one.free for one in slabs)
