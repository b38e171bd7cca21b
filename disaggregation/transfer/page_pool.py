"""Pages that are open to peers, and what of host memory they leave by."""

from __future__ import annotations

from typing import NamedTuple

from .pages import PageGroup
from .send_slots import SendSlots


class PagePool(NamedTuple):
    """Pages that are open to peers; ``number`` is that of the group among those of the backend. ``memory``: of the
    group's region. ``slots``: through which they leave a device.
    """

    group: PageGroup
    number: int
    memory: memoryview
    slots: SendSlots | None = None


def pool_of(group: PageGroup, number: int) -> PagePool:
    """What is opened to peers of ``group``, ``number`` of the backend's."""
    memory = group.region.view()
    slots = None if group.staging is None else SendSlots(group, group.staging.device, memory)
    return PagePool(group, number, memory, slots)
