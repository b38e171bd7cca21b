"""Progress of a forward pass: the computing thread counts its layers, and the transfer engine pushes finished ones."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

ALL = 1 << 62
MARKED_LAYERS = 4
"""Layers from one mark to the next. Marks are cheap (1 to 2 us each), but pages leave in a few parts at most."""


class _Mark(NamedTuple):
    """Layers ``[0, layers)`` are there once ``has_come``."""

    layers: int
    has_come: Callable[[], bool]


class LayersDone:
    """Number of layers of one pass with keys and values in the pool. One thread counts, and another one reads.

    ``mark`` is set if a device computes beside the thread that launches its work. It queues an event on the device, and
    returns a function that tells whether the device has reached it.
    """

    def __init__(self) -> None:
        self.mark: Callable[[], Callable[[], bool]] | None = None
        self._count = ctypes.c_int64(0)
        self._marks: deque[_Mark] = deque()
        self._marked = 0

    @property
    def count(self) -> int:
        """Number of the pass's layers with keys and values in the pool so far; a huge number once it has ended."""
        while self._marks and self._marks[0].has_come():
            self._marked = self._marks.popleft().layers
        return max(self._count.value, self._marked)

    @property
    def address(self) -> int:
        """Address of an int64 to which the CPU kernels write the number of finished layers."""
        return ctypes.addressof(self._count)

    def advance(self, count: int) -> None:
        """Set the number of finished layers."""
        self._count.value = count

    def launched(self, count: int) -> None:
        """Note that layers ``[0, count)`` are computed, or only launched on a device if ``mark`` is set.

        Launched layers do not count yet. After every ``MARKED_LAYERS`` layers, ``mark`` is called, and these layers
        count once the device has reached the mark.
        """
        if self.mark is None:
            self.advance(count)
        elif count % MARKED_LAYERS == 0:
            self._marks.append(_Mark(count, self.mark()))

    def mark_by(self, mark: Callable[[], Callable[[], bool]]) -> None:
        """Count layers from now on only when a device has computed them.

        ``mark`` queues an event on the device, and returns a function that tells whether the device has reached it.
        """
        self.mark = mark

    def finish(self) -> None:
        """Mark all layers as finished, because the pass has ended."""
        self._count.value = ALL


class NotCounted:
    """Progress of a pass that pushes no pages: its layers are not counted."""

    address = None

    def launched(self, count: int) -> None:
        """Do nothing: the layers of this pass are not counted."""

    def mark_by(self, mark: Callable[[], Callable[[], bool]]) -> None:
        """Do nothing: the layers of this pass are not counted, so none is marked."""


PassProgress = LayersDone | NotCounted
NOT_COUNTED = NotCounted()
