"""Names of hand-overs."""

from __future__ import annotations

import numpy as np

from pdserve.disaggregation.transfer.page_write import PageWrite
from pdserve.mem_cache.kv_pages.page_group import LayerRange
from pdserve.messages.base import HandoverId


def named(room: int, attempt: int = 1, epoch: str = "D") -> HandoverId:
    """Name a hand-over. By default it is of a decode called D, which tries each room once."""
    return HandoverId(epoch, room, attempt)


def write_of(
    src: list[int], dst: list[int], layers: tuple[int, int] = (0, 1), room: int = 1, epoch: str = "D", group: int = 0
) -> PageWrite:
    """Make a write of our pages ``src`` to the pages ``dst`` of instance D."""
    there, here = np.array(dst, dtype=np.int32), np.array(src, dtype=np.int32)
    return PageWrite(named(room, epoch=epoch), 0, here, there, LayerRange(*layers), group)
