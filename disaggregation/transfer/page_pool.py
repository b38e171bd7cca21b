"""Pages that are open to peers, what of host memory they leave by, and how the host sees their bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .pages import PageGroup, Spans
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
        """The bytes of pieces of the region, one after another; each holds until the next one is asked for."""
        if self.group.direct is not None:
            yield from self.group.direct.look([(offset, length) for offset, length in spans.tolist()])
            return
        for offset, length in spans.tolist():
            yield self.memory[offset : offset + length]

    def change(self, page: int, convert: Callable[[npt.NDArray[np.uint8]], None]) -> None:
        """Have ``convert`` change the bytes of a page, in place."""
        begin, length, direct = page * self.group.page_bytes, self.group.page_bytes, self.group.direct
        memory = self.memory[begin : begin + length] if direct is None else direct.load(begin, length)
        convert(np.frombuffer(memory, dtype=np.uint8))
        if direct is not None:
            direct.store(begin, memory)


def pool_of(group: PageGroup, number: int) -> PagePool:
    """What is opened to peers of ``group``, ``number`` of the backend's."""
    memory = group.region.view() if group.direct is None else memoryview(b"")
    slots = None if group.staging is None else SendSlots(group, group.staging.device, memory)
    return PagePool(group, number, memory, slots)
