"""Pools on a device that backends reach by their addresses, with no memory of the host in between.

Where both sides are such pools, their devices compute the checksums (``word_sum.py``). The host can't see such a page.
If it has to, it copies some to a window of its memory, which costs a copy from the device for each page. It has to if
the other side's pool is the host's, or if pages have another order. ``--disable-handover-checksum`` leaves checksums
out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..errors import RegionError
from .staging import DevicePages, Piece

WINDOW_BYTES = 4 << 20
"""Of a window, where pages aren't larger."""


class DeviceMemory:
    """The bytes of a pool as a region, for backends that take addresses of a device. See ``region.Region``."""

    fd = None

    def __init__(self, pages: DevicePages) -> None:
        self._pages = pages

    @property
    def nbytes(self) -> int:
        """Of the whole pool."""
        return self._pages.nbytes

    @property
    def address(self) -> int:
        """On the device, now: memory that was given back and taken again has another."""
        return self._pages.address

    def view(self) -> memoryview:
        """Raises ``RegionError``: nothing of it is the host's."""
        raise RegionError("the host has no view of a pool on a device")


class Direct(NamedTuple):
    """A pool on a device, the ``ordinal``th of its kind. ``window``: host memory that takes a page of it at least."""

    device: DevicePages
    window: memoryview
    ordinal: int

    def look(self, spans: list[tuple[int, int]]) -> Iterator[memoryview]:
        """The bytes of ``spans`` (offset, length), one after another; what is yielded holds until the next one is."""
        pieces: list[Piece] = []
        used = 0
        for begin, length in spans:
            at = 0
            while at < length:
                count = min(length - at, len(self.window) - used)
                pieces.append(Piece(begin + at, self.window[used : used + count]))
                at, used = at + count, used + count
                if used == len(self.window):
                    self.device.read(pieces)
                    yield self.window
                    pieces, used = [], 0
        if pieces:
            self.device.read(pieces)
            yield self.window[:used]

    def load(self, begin: int, length: int) -> memoryview:
        """A page in the window, to be changed there."""
        memory = self.window[:length]
        self.device.read([Piece(begin, memory)])
        return memory

    def store(self, begin: int, memory: memoryview) -> None:
        """What ``load`` gave, back to its place."""
        self.device.write([Piece(begin, memory)])
