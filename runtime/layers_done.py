"""How far a forward pass is: whoever computes it counts its layers, the transfer engine pushes those that are done."""

from __future__ import annotations

import ctypes

ALL = 1 << 62


class LayersDone:
    """Layers of one pass whose keys and values are in the pool. One thread counts; any may read, at any time."""

    def __init__(self) -> None:
        self._count = ctypes.c_int64(0)

    @property
    def count(self) -> int:
        """Layers ``[0, count)`` are there; may exceed their number."""
        return self._count.value

    @property
    def address(self) -> int:
        """Where the kernels count: an int64."""
        return ctypes.addressof(self._count)

    def advance(self, count: int) -> None:
        """Layers ``[0, count)`` are there."""
        self._count.value = count

    def finish(self) -> None:
        """The pass is over: all are."""
        self._count.value = ALL
