"""Pools on a device that backends reach by their addresses, with no memory of the host in between.

Where both sides are such pools, their devices compute the checksums (``word_sum.py``). The host waits once for many. It
can't see such a page. If it has to, it copies some to a window of its memory, which costs a copy from the device for
each page. It has to if the other side's pool is the host's, or if pages have another order.
``--disable-handover-checksum`` leaves checksums out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .region import RegionError
from .staging import DevicePages, Piece

WINDOW_BYTES = 4 << 20
"""Size of a window in bytes, unless pages are larger."""


class DeviceMemory:
    """The bytes of a pool as a region, for backends that take addresses of a device. See ``region.Region``."""

    fd = None

    def __init__(self, pages: DevicePages) -> None:
        self._pages = pages

    @property
    def nbytes(self) -> int:
        """Size of the pool in bytes."""
        return self._pages.nbytes

    @property
    def address(self) -> int:
        """Current device address of the pool's first byte. It changes when the memory is released and resumed."""
        return self._pages.address

    def view(self) -> memoryview:
        """Raise ``RegionError``: the host can't see the pool."""
        raise RegionError("the host has no view of a pool on a device")


class Direct(NamedTuple):
    """A pool on a device, the ``ordinal``th of its kind. ``window``: host memory that takes a page of it at least."""

    device: DevicePages
    window: memoryview
    ordinal: int

    def look(self, spans: list[tuple[int, int]]) -> Iterator[memoryview]:
        """Copy the bytes of ``spans`` (offset, length) from the pool to the host memory ``window``.

        Yield views of it in the order of the bytes, each at most of its size and valid until the next is yielded.
        """
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
        """Copy ``length`` bytes of the pool, from offset ``begin`` on, to the host memory ``window``.

        Return a view of them there. The caller may change them, and ``store`` copies them back.
        """
        memory = self.window[:length]
        self.device.read([Piece(begin, memory)])
        return memory

    def store(self, begin: int, memory: memoryview) -> None:
        """Copy ``memory``, bytes that ``load`` returned, back to offset ``begin`` of the pool."""
        self.device.write([Piece(begin, memory)])
