"""Host memory between a pool on a device and backends that move bytes of the host.

    sending      pages ─ copied ─▶ a slot each ─ hashed, written by the backend, landed ─▶ the slots are free
    receiving    connection, or the writer's library ─▶ a slab ─ hashed, brought into our order, copied ─▶ pages; the
                 slab is free

All of it is the transfer engine's, in its thread. A copy is done when its call returns, so what is said of pages on a
device is what is said of those in host memory: when a hand-over has ended, nothing reads or writes them any more, and
what has landed is there. Copies have a stream of their own and wait for no step. Only what the
device has computed is copied (``runtime/layers_done.py``).

Slots and slabs are apart: two instances that had filled all they have with pages for each other would wait for ever. So
a hand-over needs one slot, and one slab at the other end, however long it is, and what waits for one holds none.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ...messages.base import I32

SLAB_BYTES = 4 << 20
"""Of a slab, where pages aren't larger."""
SCRATCH_BYTES = 4096
"""Behind the slabs, where a library may try whether it reaches them."""


class Piece(NamedTuple):
    """Bytes from ``offset`` on in a pool, and as many of the host's."""

    offset: int
    memory: memoryview


class DevicePages(Protocol):
    """A pool on a device, as bytes. Calls return when what they ask for is done."""

    @property
    def nbytes(self) -> int:
        """Of the whole pool."""
        ...

    @property
    def address(self) -> int:
        """Of its first byte, on the device."""
        ...

    def read(self, pieces: Sequence[Piece]) -> None:
        """Copy bytes of the pool to the host's."""
        ...

    def write(self, pieces: Sequence[Piece]) -> None:
        """Copy the host's to the pool."""
        ...

    @property
    def has_sums(self) -> bool:
        """Whether the device can compute ``word_sum``."""
        ...

    def word_sum(self, pages: I32, layers: tuple[int, int], num_layers: int) -> int:
        """Compute the checksum (``word_sum.py``) of layers ``[begin, end)`` of pages, of ``num_layers`` equal ones."""
        ...


class Slabs:
    """Equal parts of ``memory``, handed out one by one. What is left over at its end is nobody's."""

    def __init__(self, memory: memoryview, slab_bytes: int) -> None:
        self.slab_bytes = slab_bytes
        self.count = len(memory) // slab_bytes
        self.memory = memory
        self._free = [memory[i * slab_bytes : (i + 1) * slab_bytes] for i in range(self.count)]

    @property
    def address(self) -> int:
        """Of the first one, in this process."""
        return _address(self.memory)

    @property
    def nbytes(self) -> int:
        """Of all slabs together."""
        return self.count * self.slab_bytes

    def offset_of(self, slab: memoryview) -> int:
        """Where a slab begins, from the first one on."""
        return _address(slab) - self.address

    @property
    def free(self) -> int:
        """How many nobody has."""
        return len(self._free)

    def take(self) -> memoryview | None:
        """One that nobody else has until it is given back; None where there is none."""
        return self._free.pop() if self._free else None

    def give(self, slab: memoryview) -> None:
        """Nobody reads or writes it any more."""
        self._free.append(slab)


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Staging(NamedTuple):
    """How pages of a group come and go whose pool is on a device. ``slabs``: of all groups together."""

    device: DevicePages
    slabs: Slabs


class StagingSizes(NamedTuple):
    """``slots``: of each group. ``slab_bytes``, ``slabs``: of all together."""

    slots: tuple[int, ...]
    slab_bytes: int
    slabs: int


def divide(nbytes: int, page_bytes: Sequence[int]) -> StagingSizes:
    """Half of ``nbytes`` for what is sent, in equal parts for each group of pages, and half for what lands.

    At least one slot for each group, and one slab that takes a page of any: however little ``nbytes`` is.
    """
    share = nbytes // 2 // len(page_bytes)
    slab_bytes = max(*page_bytes, min(SLAB_BYTES, nbytes // 2 // 2))
    slots = tuple(max(1, share // one) for one in page_bytes)
    return StagingSizes(slots, slab_bytes, max(1, nbytes // 2 // slab_bytes))
