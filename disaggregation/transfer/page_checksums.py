"""What is known of a hand-over's pages that have passed through host memory on their way to a device.

Their bytes are out of reach of the host by the time that they are checked. So they are hashed as they pass, a batch
at a time, as the writer hashed its slices: a batch is a slice. From then on the copy to the device is trusted.

Pages of another order are brought into ours on the way, behind the hash.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import xxhash

from ...mem_cache.kv_pages.page_group import LayerRange, PageGroup
from ...mem_cache.kv_pages.page_order import PageConverter
from ...messages.base import I32
from ...messages.handover import MAX_SLICES
from ...messages.worker import KVLayout, KVOrder
from ..errors import LinkLost

_Key = tuple[int, int, int, bytes]


class PageChecksums:
    """Checksums of a hand-over's batches. ``pieces``: number of page layers received, with repetitions."""

    def __init__(
        self,
        layout: KVLayout | None = None,
        order: KVOrder | None = None,
        groups: Sequence[int] = (),
        *,
        summed: bool = True,
    ) -> None:
        """Note checksums of pages, and convert pages from ``order`` to the order of ``layout``.

        ``layout`` is ours; with ``order`` None the pages come in our order. ``groups``: group numbers within the
        layout, indexed by those of the backend. ``summed``: whether there will be checksums. Raises ``ValueError`` for
        an order that can't be converted.
        """
        self._layout = layout
        self._order = None if layout is not None and order == layout.order else order
        if self._order is not None and layout is None:
            raise ValueError(f"pages in the order {order!r}, and nothing is known of our own")
        self._groups = groups
        self._summed = summed
        self._sums: dict[_Key, int] = {}
        self._converters: dict[tuple[int, int], PageConverter] = {}
        self.pieces = 0
        for number in range(len(groups)):
            self.converter(number, 1)

    def landing(self, group: PageGroup, number: int, layers: LayerRange, pages: I32) -> PassedPages:
        """Make the record of a batch that passes through host memory in parts. ``number``: the group's number in the
        backend.
        """
        return PassedPages(self, group, number, layers, pages)

    def note(self, number: int, layers: LayerRange, pages: I32, checksum: int) -> None:
        """Record the checksum of a batch that is on the device. Raises ``LinkLost`` after ``MAX_SLICES`` batches."""
        if len(self._sums) >= MAX_SLICES:
            raise LinkLost(f"the peer wrote more than {MAX_SLICES} batches for one hand-over")
        self.pieces += len(pages) * (layers.end - layers.begin)
        self._sums[_key(number, layers, pages)] = checksum

    def checksum(self, number: int, layers: LayerRange, pages: I32) -> int | None:
        """Return the recorded checksum of the batch with exactly these ``layers`` and ``pages`` of group ``number``, or
        None.
        """
        return self._sums.get(_key(number, layers, pages))

    def hasher(self) -> xxhash.xxh3_64 | None:
        """Return a hasher for a batch, or None if checksums are off."""
        return xxhash.xxh3_64() if self._summed else None

    def converter(self, number: int, num_layers: int) -> PageConverter | None:
        """Return the converter of ``num_layers`` layers of a page to our order; None if they come in our order.

        ``number``: the group's number in the backend. All layers are alike, so only their number matters.
        """
        if self._order is None or self._layout is None:
            return None
        found = self._converters.get((number, num_layers))
        if found is None:
            kept = self._layout.groups[self._groups[number]]
            part = msgspec.structs.replace(
                kept, layers=kept.layers[:num_layers], page_bytes=kept.page_bytes // kept.num_layers * num_layers
            )
            layout = msgspec.structs.replace(self._layout, groups=(part,))
            found = self._converters[number, num_layers] = PageConverter(layout, self._order)
        return found


class PassedPages:
    """A batch that passes through host memory in parts."""

    def __init__(self, landed: PageChecksums, group: PageGroup, number: int, layers: LayerRange, pages: I32) -> None:
        self._landed = landed
        self._batch = number, layers, pages
        self._hasher = landed.hasher()
        self._converter = landed.converter(number, layers.end - layers.begin)
        self._piece_bytes = group.piece_bytes(layers)

    def pass_on(self, memory: memoryview) -> None:
        """Hash the next pages of the batch in ``memory``, and convert them to our order in place."""
        if self._hasher is not None:
            self._hasher.update(memory)
        if self._converter is not None:
            for begin in range(0, len(memory), self._piece_bytes):
                self._converter.convert(np.frombuffer(memory[begin : begin + self._piece_bytes], dtype=np.uint8))

    def done(self) -> None:
        """Record the batch's checksum after all of its pages are on the device."""
        self._landed.note(*self._batch, self._hasher.intdigest() if self._hasher is not None else 0)


def _key(number: int, layers: LayerRange, pages: I32) -> _Key:
    return number, layers.begin, layers.end, pages.astype(np.int32).tobytes()
