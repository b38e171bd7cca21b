"""Host memory between a pool on a device and backends that move bytes of the host.

    sending      pages ─ copied ─▶ a slot each ─ hashed, written by the backend, landed ─▶ the slots are free
    receiving    connection, or the writer's library ─▶ a slab ─ hashed, brought into our order, copied ─▶ pages; the
                 slab is free

The transfer engine owns all of it, in its thread. A copy is complete when its call returns. So pages on a device have
the same guarantees as pages in host memory. After the end of a hand-over nothing reads or writes its pages, and landed
pages are on the device. Copies have a stream of their own and wait for no step. Only what the device has computed is
copied (``runtime/layers_done.py``).

Slots and slabs are separate. Otherwise two instances could fill all their memory with pages for each other and wait for
ever. A hand-over of any length needs one slot, and one slab at the other end. While it waits for one it holds none.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ...messages.base import I32

SLAB_BYTES = 4 << 20
"""Maximum size of a slab in bytes, unless a page is larger."""
SCRATCH_BYTES = 4096
"""Bytes after the slabs, where a library may test whether it reaches them."""


class Piece(NamedTuple):
    """A range of a pool that begins at ``offset``, and host memory of the same length."""

    offset: int
    memory: memoryview


class Part(NamedTuple):
    """Layers ``[begin, end)`` of pages."""

    pages: I32
    begin: int
    end: int


class DevicePages(Protocol):
    """Interface to the bytes of a pool on a device. Calls return when their work is done."""

    @property
    def nbytes(self) -> int:
        """Size of the pool in bytes."""
        ...

    @property
    def address(self) -> int:
        """Device address of its first byte."""
        ...

    def read(self, pieces: Sequence[Piece]) -> None:
        """Copy bytes of the pool to host memory. A piece names an offset in the pool and the memory to fill."""
        ...

    def write(self, pieces: Sequence[Piece]) -> None:
        """Copy host memory to the pool. A piece names an offset in the pool and the memory to copy there."""
        ...

    @property
    def has_sums(self) -> bool:
        """Whether the device can compute ``word_sums``."""
        ...

    def word_sums(self, parts: Sequence[Part], num_layers: int) -> list[int]:
        """Compute the checksum (``word_sum.py``) of each part on the device, and wait once for all of them.

        ``num_layers``: number of equal layers of a page.
        """
        ...


class Slabs:
    """Equal parts of ``memory``, handed out one by one. A rest at its end is not used."""

    def __init__(self, memory: memoryview, slab_bytes: int) -> None:
        self.slab_bytes = slab_bytes
        self.count = len(memory) // slab_bytes
        self.memory = memory
        self._free = [memory[i * slab_bytes : (i + 1) * slab_bytes] for i in range(self.count)]

    @property
    def address(self) -> int:
        """Address of the first slab in this process."""
        return _address(self.memory)

    @property
    def nbytes(self) -> int:
        """Total size of all slabs, free or not, in bytes."""
        return self.count * self.slab_bytes

    def offset_of(self, slab: memoryview) -> int:
        """Return the offset of a slab from the first one, in bytes."""
        return _address(slab) - self.address

    @property
    def free(self) -> int:
        """Number of free slabs."""
        return len(self._free)

    def take(self) -> memoryview | None:
        """Take a free slab for exclusive use until ``give``. Return None if there is none."""
        return self._free.pop() if self._free else None

    def give(self, slab: memoryview) -> None:
        """Free a slab that ``take`` returned and that is not read or written any more."""
        self._free.append(slab)


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Staging(NamedTuple):
    """Staging of a group with a pool on a device. ``slabs`` are shared by all groups."""

    device: DevicePages
    slabs: Slabs


class StagingSizes(NamedTuple):
    """Sizes of staging memory: ``slots`` of each group; size and number of the slabs that all groups share."""

    slots: tuple[int, ...]
    slab_bytes: int
    slabs: int


def divide(nbytes: int, page_bytes: Sequence[int]) -> StagingSizes:
    """Divide ``nbytes`` of staging memory: half for sending, in equal parts for each group, and half for receiving.

    ``page_bytes``: bytes of a page of each group. A slot takes one page to send, a slab takes several received ones.
    There is at least one slot for each group and one slab that takes any group's page, even if that needs more than
    ``nbytes``.
    """
    share = nbytes // 2 // len(page_bytes)
    slab_bytes = max(*page_bytes, min(SLAB_BYTES, nbytes // 2 // 2))
    slots = tuple(max(1, share // one) for one in page_bytes)
    return StagingSizes(slots, slab_bytes, max(1, nbytes // 2 // slab_bytes))
