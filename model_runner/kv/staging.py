"""Pools as the transfer engine takes them: the host's, and those on a device, through pinned memory or by address."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ...mem_cache.kv_pages.direct import WINDOW_BYTES, DeviceMemory, Direct
from ...mem_cache.kv_pages.page_group import LayerRange, PageGroup
from ...mem_cache.kv_pages.region import HostMemory
from ...mem_cache.kv_pages.staging import SCRATCH_BYTES, Part, Piece, Slabs, Staging, divide
from ...mem_cache.kv_pages.word_sum import WORD_BYTES
from ...messages.worker import KVLayout
from ..device.base import Device
from ..device.triton_support import triton_refusal
from .block_pool import BlockPool
from .pool import KVPool

log = logging.getLogger(__name__)

GB = 10**9
DEFAULT_GB = 0.25
SUMS_AT_ONCE = 256
"""Checksums that a device computes while the host waits once."""


class PoolPages:
    """Bytes of a pool; see ``DevicePages``. For one thread, which need not be the one that runs steps."""

    def __init__(self, pool: BlockPool | KVPool, device: Device) -> None:
        self._data = torch.from_numpy(pool.data) if isinstance(pool, BlockPool) else pool.data
        self._device = device

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool, page 0 included."""
        return self._data.nbytes

    @property
    def address(self) -> int:
        """Address of page 0 on the device."""
        return self._data.data_ptr()

    def read(self, pieces: Sequence[Piece]) -> None:
        """Copy bytes of the pool to host memory, and wait for that.

        Each piece is an offset in the pool and the host buffer to fill.
        """
        self._device.transfer([(host, there) for there, host in self._pairs(pieces)])

    def write(self, pieces: Sequence[Piece]) -> None:
        """Copy bytes of host memory to the pool, and wait for that.

        Each piece is an offset in the pool and the host buffer to copy there.
        """
        self._device.transfer(self._pairs(pieces))

    @property
    def has_sums(self) -> bool:
        """Whether the pool's device can compute checksums: Triton's kernels run on it."""
        return triton_refusal(self._data.device) is None

    def word_sums(self, parts: Sequence[Part], num_layers: int) -> list[int]:
        """Return a 64-bit checksum for each of ``parts`` (pages and a range of layers), computed by a Triton kernel.

        The kernels run beside the steps. The host waits once for each ``SUMS_AT_ONCE`` checksums. ``num_layers``:
        layers of a page.
        """
        from .triton.checksum import page_checksum

        sums: list[int] = []
        for at in range(0, len(parts), SUMS_AT_ONCE):
            some = parts[at : at + SUMS_AT_ONCE]
            with self._device.beside_steps():
                out = torch.empty(len(some), dtype=torch.int64, device=self._data.device)
                for i, (pages, begin, end) in enumerate(some):
                    there = self._device.upload(pages)
                    page_checksum(self._data, there, LayerRange(begin, end), num_layers, out[i : i + 1])
                self._device.transfer([(self._sums[: len(some)], out)])
            sums += [found % 2**64 for found in self._sums[: len(some)].tolist()]
        return sums

    @cached_property
    def _sums(self) -> Tensor:
        """Host memory for ``SUMS_AT_ONCE`` checksums, allocated at first use."""
        return self._device.host_zeros((SUMS_AT_ONCE,), torch.int64)

    def _pairs(self, pieces: Sequence[Piece]) -> list[tuple[Tensor, Tensor]]:
        flat = self._data.view(-1).view(torch.uint8)
        return [(flat[at : at + len(memory)], torch.frombuffer(memory, dtype=torch.uint8)) for at, memory in pieces]


def direct_groups(layout: KVLayout, pools: Sequence[BlockPool | KVPool], device: Device) -> list[PageGroup | None]:
    """Return the page groups of ``pools`` that peers reach by device address, one for each group of the layout.

    A group with pages of no bytes is None. One host buffer, through which single pages can be read, is allocated here
    for all.
    """
    largest = max(group.page_bytes for group in layout.groups)
    window = _host_memory(device, max(largest, WINDOW_BYTES))
    groups: list[PageGroup | None] = []
    for group, pool in zip(layout.groups, pools, strict=True):
        if not group.page_bytes:
            groups.append(None)
            continue
        pages = PoolPages(pool, device)
        if pages.has_sums and group.page_bytes % (group.num_layers * WORD_BYTES) == 0:
            # The kernel is compiled now, and not while hand-overs wait.
            pages.word_sums([Part(np.zeros(1, dtype=np.int32), 0, group.num_layers)], group.num_layers)
        direct = Direct(pages, window, device.torch.index or 0)
        groups.append(PageGroup.of(group, DeviceMemory(pages), direct=direct))
    return groups


def staged_groups(
    layout: KVLayout, pools: Sequence[BlockPool | KVPool], device: Device, gigabytes: float | None
) -> list[PageGroup | None]:
    """Return the page groups of ``pools`` that peers reach through host memory, one for each group of the layout.

    A group with pages of no bytes is None. ``gigabytes`` (10^9 bytes; None: ``DEFAULT_GB``) of host memory are
    allocated here.
    """
    kept = [group for group in layout.groups if group.page_bytes]
    sizes = divide(int((DEFAULT_GB if gigabytes is None else gigabytes) * GB), [group.page_bytes for group in kept])
    log.info(
        "KV goes to peers through %s pages of host memory, and comes through %d slabs of %.1f MiB",
        " and ".join(map(str, sizes.slots)),
        sizes.slabs,
        sizes.slab_bytes / 2**20,
    )
    slabs = Slabs(_host_memory(device, sizes.slabs * sizes.slab_bytes + SCRATCH_BYTES), sizes.slab_bytes)
    slots = dict(zip(kept, sizes.slots, strict=True))
    groups: list[PageGroup | None] = []
    for group, pool in zip(layout.groups, pools, strict=True):
        if not group.page_bytes:
            groups.append(None)
            continue
        region = HostMemory(_host_memory(device, (slots[group] + 1) * group.page_bytes))
        groups.append(PageGroup.of(group, region, Staging(PoolPages(pool, device), slabs)))
    return groups


def _host_memory(device: Device, nbytes: int) -> memoryview:
    return memoryview(device.host_zeros((nbytes,), torch.uint8).numpy().data)
