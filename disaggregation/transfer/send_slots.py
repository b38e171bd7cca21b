"""Slots of host memory that pages of a device wait in while a backend writes them to a peer."""

from __future__ import annotations

import numpy as np

from ...mem_cache.kv_pages.page_group import LayerRange, PageGroup, neighbour_spans
from ...mem_cache.kv_pages.staging import DevicePages, Piece
from ...messages.base import I32


class SendSlots:
    """Slots of a group: pages of its region, from which a ``PageWrite`` reads. Slot 0, like page 0, is not used."""

    def __init__(self, group: PageGroup, device: DevicePages, memory: memoryview) -> None:
        self._group = group
        self._device = device
        self._memory = memory
        self.count = group.num_sources - 1
        self._free = list(range(self.count, 0, -1))

    @property
    def free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def fetch(self, pages: I32, layers: LayerRange) -> I32:
        """Copy ``layers`` of each page from the device to a free slot, and return the slots, in the order of ``pages``.

        If too few slots are free, only the first pages are copied.
        """
        count = min(len(pages), self.free)
        # Ascending, so that pages which are neighbours are copied, hashed and sent in one piece.
        slots = np.sort(np.array(self._free[len(self._free) - count :], dtype=np.int32))
        del self._free[len(self._free) - count :]
        group, pages = self._group, pages[:count]
        if layers == group.whole():
            source, here = neighbour_spans(pages, slots, group.page_bytes)
        else:
            source, here = group.spans(pages, layers), group.spans(slots, layers)
        self._device.read(
            [
                Piece(offset, self._memory[at : at + length])
                for (offset, length), at in zip(source.tolist(), here[:, 0].tolist(), strict=True)
            ]
        )
        return slots

    def give(self, slots: I32) -> None:
        """Free slots that ``fetch`` returned and that no write reads any more."""
        self._free.extend(sorted(slots.tolist(), reverse=True))
