"""Slots of host memory that pages of a device wait in while a backend writes them to a peer."""

from __future__ import annotations

import numpy as np

from ...messages.base import I32
from .pages import LayerRange, PageGroup, neighbour_spans
from .staging import DevicePages, Piece


class SendSlots:
    """Those of a group: pages of its region, which is where a ``PageWrite`` reads. Slot 0, as page 0, is nobody's."""

    def __init__(self, group: PageGroup, device: DevicePages, memory: memoryview) -> None:
        self._group = group
        self._device = device
        self._memory = memory
        self.count = group.num_sources - 1
        self._free = list(range(self.count, 0, -1))

    @property
    def free(self) -> int:
        """How many nobody has."""
        return len(self._free)

    def fetch(self, pages: I32, layers: LayerRange) -> I32:
        """Copy ``layers`` of ``pages`` to a slot each, of the first ones where fewer are free; returns the slots."""
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
        """Nobody reads them any more."""
        self._free.extend(sorted(slots.tolist(), reverse=True))
