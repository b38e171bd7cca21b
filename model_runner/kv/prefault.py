"""Commits the KV pool's memory a little ahead of its use, while the worker has nothing else to do.

A pool page costs nothing until it is first written, and then a fault for every 4 KiB of it. A fault takes 1.4 µs if the
kernel has the memory at hand, and up to 10 µs if a hypervisor has to find it first. A prompt of 512 tokens of a small
model brings 2,900 such faults, 4 to 30 ms on top of a pass of 145 ms. Committing the whole pool at start would take
seconds and gigabytes that may never be used. So the worker keeps a margin ahead of the highest page that a step
touched. (The allocator hands out low pages first and reuses freed ones, so that page is what marks the pool's use.)

In a control group, or if other processes take the host's memory meanwhile, committing the last of it would bring the
out-of-memory killer. Ahead of use, the margin therefore never touches a reserve.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...messages.base import unpack_i32
from ...runtime.machine.memory import Memory, host_memory

if TYPE_CHECKING:
    from ...mem_cache.kv_pages.region import KVRegion
    from ...messages.worker import ForwardStep, KVLayout

log = logging.getLogger(__name__)

MARGIN_BYTES = 64 << 20
"""KV of 2,900 tokens of SmolLM2, or of 500 of an 8B model: one burst of prompts. The worker commits again behind it.

More would delay the other processes of a host, which start at the same time, and stay in memory unused.
"""
FIRST_BYTES = 8 << 20
"""Committed before the first step: a first prompt of 370 tokens of SmolLM2. Instances may stay idle for long."""
MARGIN_SHARE = 8
"""Never more than this part of the memory that is free when the pool is made: others may want it first."""
SLICE_BYTES = 256 << 10
"""Committed at a time: a step that arrives meanwhile waits for at most some 0.6 ms."""
RESERVE_SHARE = 10
"""This part of all memory stays free of what is only committed ahead."""
LOOK_BYTES = 16 << 20
"""Committed between two looks at what is free, each of which takes some 0.1 ms."""
IDLE_MS = 5
"""The worker is idle when nothing has come for so long: longer than the gap between two steps."""


class PoolPrefault:
    """Knows how much of ``region`` is committed. One thread; ``slot_bytes``: bytes of KV of one token.

    ``memory`` tells what there is now.
    """

    def __init__(
        self, region: KVRegion | None, slot_bytes: int, memory: Callable[[], Memory], margin_bytes: int = MARGIN_BYTES
    ) -> None:
        self._region = region
        self._slot_bytes = slot_bytes
        self._memory = memory
        self._margin = margin_bytes
        self._looked_until = 0
        self._end = 0
        self._is_idle = False
        self._is_private = region is not None and region.fd is None
        self._most = 0 if region is None else region.nbytes
        self._target = 0
        self.again()

    @classmethod
    def of(cls, region: KVRegion | None, layout: KVLayout) -> PoolPrefault:
        """Make the prefault of ``region``, with a margin that depends on the host memory that is free now.

        The margin is how many bytes beyond the last used slot are committed ahead, at most ``MARGIN_BYTES``. None as
        ``region``: there is nothing to commit.
        """
        margin = min(MARGIN_BYTES, host_memory().free // MARGIN_SHARE)
        # Window pages are few, and used over and over.
        return cls(region, layout.groups[0].page_bytes // layout.page_size, host_memory, margin)

    @property
    def committed(self) -> int:
        """Bytes that ``advance`` has committed (faulted in) so far, from the region's beginning."""
        return self._end

    @property
    def committed_privately(self) -> int:
        """Bytes of ``committed`` that count as private memory of this process: 0 for a shared region."""
        return self._end if self._is_private else 0

    @property
    def trimmed(self) -> int:
        """Bytes at the region's end that ``trim`` cut off, so that they are never committed."""
        return 0 if self._region is None else self._region.nbytes - self._most

    @property
    def wait_ms(self) -> int:
        """Milliseconds to wait for work before ``advance`` is called; -1 (no limit) if there is nothing to commit."""
        if self._end >= self._target:
            return -1
        return 0 if self._is_idle else IDLE_MS

    def used(self, slot: int) -> None:
        """Note that a step writes up to ``slot``; ``advance`` then commits memory up to a margin of bytes beyond it."""
        self._is_idle = False
        if self._region is not None:
            self._target = max(self._target, min((slot + 1) * self._slot_bytes + self._margin, self._most))

    def trim(self, nbytes: int) -> None:
        """Use only the first ``nbytes`` of the region from now on: the memory beyond was given back to the system."""
        self._most = nbytes
        self._end = self._looked_until = min(self._end, nbytes)
        self._target = min(self._target, nbytes)

    def forget(self) -> None:
        """Count nothing as committed, and commit nothing until ``again``: the region's memory was given back."""
        self._end = self._looked_until = self._target = 0

    def again(self) -> None:
        """Resume after ``forget``, when the region's memory is in use again.

        ``advance`` then commits it from the beginning, ``FIRST_BYTES`` until a step uses some of it.
        """
        if self._region is not None:
            self._target = min(FIRST_BYTES, self._margin, self._most)

    def advance(self) -> None:
        """Commit (fault in) the next slice of the region ahead of its use, within the margin beyond the last used slot.

        The worker calls this when it has had no work for ``wait_ms``. Nothing is committed if little memory of the host
        is free. If the kernel refuses, nothing is committed any more.
        """
        self._is_idle = True
        if self._region is None or self._end >= self._target:
            return
        if self._end >= self._looked_until:
            total, free = self._memory()
            if free - LOOK_BYTES < total // RESERVE_SHARE:
                # Asked again when a step has used more of the pool.
                self._target = self._end
                return
            self._looked_until = self._end + LOOK_BYTES
        end = min(self._end + SLICE_BYTES, self._most)
        if not self._region.commit(self._end, end):
            log.info(
                "memory can't be committed ahead (Linux before 5.14, or none left): each KV page's first use is slower"
            )
            self._region = None
            self._target = 0
            return
        self._end = end


def highest_slot(step: ForwardStep) -> int:
    """Return the highest KV slot that the step writes, 0 if it writes none."""
    return int(unpack_i32(step.out_cache_loc).max(initial=0))
