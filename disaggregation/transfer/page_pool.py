"""Pages that are open to peers, what of host memory they leave by, and how the host sees their bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from ...mem_cache.kv_pages.page_group import LayerRange, PageGroup, Spans
from ...mem_cache.kv_pages.staging import Part
from ...mem_cache.kv_pages.word_sum import WORD_BYTES, WordSum
from ...messages.base import I32
from .send_slots import SendSlots


class PagePool(NamedTuple):
    """Pages that are open to peers; ``number`` is that of the group among those of the backend. ``memory``: of the
    group's region, empty where that is a device's. ``slots``: through which they leave a device.
    """

    group: PageGroup
    number: int
    memory: memoryview
    slots: SendSlots | None = None

    def look(self, spans: Spans) -> Iterator[memoryview]:
        """Yield the bytes of ``spans`` of the region in order, from a device by way of host memory.

        Each view is valid until the next is yielded.
        """
        if self.group.direct is not None:
            yield from self.group.direct.look([(offset, length) for offset, length in spans.tolist()])
            return
        for offset, length in spans.tolist():
            yield self.memory[offset : offset + length]

    @property
    def has_sums(self) -> bool:
        """Whether pages lie on a device that can sum them up itself."""
        group = self.group
        is_whole = group.page_bytes % (group.num_layers * WORD_BYTES) == 0
        return group.direct is not None and is_whole and group.direct.device.has_sums

    def word_sums(self, parts: Sequence[Part]) -> list[int]:
        """Compute the checksum of each of ``parts`` on the device, and wait once. Only valid if ``has_sums``."""
        assert self.group.direct is not None
        return self.group.direct.device.word_sums(parts, self.group.num_layers)

    def checksum(self, pages: I32, layers: LayerRange) -> int:
        """Compute the xxh3 checksum of ``layers`` of ``pages`` on the host, in the order of ``pages``."""
        hasher = new_hasher("xxh3")
        for piece in self.look(self.group.spans(pages, layers)):
            hasher.update(piece)
        return hasher.intdigest()

    def change(self, page: int, convert: Callable[[npt.NDArray[np.uint8]], None]) -> None:
        """Have ``convert`` change the bytes of a page in place; on a device, they are copied to the host and back."""
        begin, length, direct = page * self.group.page_bytes, self.group.page_bytes, self.group.direct
        memory = self.memory[begin : begin + length] if direct is None else direct.load(begin, length)
        convert(np.frombuffer(memory, dtype=np.uint8))
        if direct is not None:
            direct.store(begin, memory)


def new_hasher(algorithm: Literal["xxh3", "words"]) -> xxhash.xxh3_64 | WordSum:
    """Make a hasher of the checksum ``algorithm``, for bytes that are in host memory."""
    return WordSum() if algorithm == "words" else xxhash.xxh3_64()


def pool_of(group: PageGroup, number: int) -> PagePool:
    """Make a new pool for ``group``. ``number``: index of the group among those that the backend moves.

    Call this once for each group: every pool hands out the group's slots for sending by itself.
    """
    memory = group.region.view() if group.direct is None else memoryview(b"")
    slots = None if group.staging is None else SendSlots(group, group.staging.device, memory)
    return PagePool(group, number, memory, slots)
