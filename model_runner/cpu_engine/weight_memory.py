"""Memory that packed weights lie in: a file that instances map, or huge pages of one process.

A step reads all weights, so pages of 4 KiB cost it time for address translation. The page cache of a file has huge
pages if the file was written in large aligned chunks. The file system has to support large folios: XFS does, and ext4
from Linux 6.16 on.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

CHUNK = 8 << 20
"""Bytes that are written or moved at once: whole huge pages."""
MIB = 2**20
PUNCH_HOLE = 3
"""``FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE``."""


class WeightMemory:
    """Bytes of packed weights that can only be read. They are mapped as long as this object lives."""

    def __init__(self, mapping: mmap.mmap, page_cache: int = 0) -> None:
        self.data: npt.NDArray[np.uint8] = np.frombuffer(mapping, dtype=np.uint8)
        """All bytes; they keep the mapping."""
        self.page_cache = page_cache
        """Bytes that the kernel counts as available, because it could read them from the disk again."""

    @property
    def address(self) -> int:
        """Address of the first byte in this process."""
        begin: int = self.data.ctypes.data
        return begin


def map_file(fd: int) -> WeightMemory:
    """Map a file that is not empty for reading, and lock its pages in memory if the system allows it.

    Unlocked, the kernel drops pages of files first under pressure, and each step would then read weights from the disk.
    Raises ``OSError``.
    """
    size = os.fstat(fd).st_size
    # Read-only: a write by mistake ends the process, and changes nothing for the others.
    mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    _want_huge_pages(mapping)
    memory = WeightMemory(mapping)
    if not lock_memory(memory.address, size):
        memory.page_cache = size
    return memory


def take_memory(fd: int) -> WeightMemory:
    """Move the contents of a ``make_memory`` file to read-only huge pages of this process, chunk by chunk.

    The file's memory is freed chunk by chunk as well, so little is held twice. ``fd`` stays open. Raises ``OSError``.
    """
    size = os.fstat(fd).st_size
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _want_huge_pages(mapping)
    with memoryview(mapping) as view:
        for begin in range(0, size, CHUNK):
            end = min(begin + CHUNK, size)
            while begin < end:
                with view[begin:end] as rest:
                    begin += os.preadv(fd, [rest], begin)
            _punch_hole(fd, end)
    memory = WeightMemory(mapping)
    libc = ctypes.CDLL(None)
    libc.mprotect(ctypes.c_void_p(memory.address), ctypes.c_size_t(size), mmap.PROT_READ)
    return memory


def make_memory() -> int:
    """Create an empty file without a name, in memory, and return its descriptor."""
    return os.memfd_create("pdserve-weights", os.MFD_CLOEXEC)


def lock_memory(address: int, nbytes: int) -> bool:
    """Keep mapped pages in memory until they are unmapped. Return False, with nothing locked, if the system refuses."""
    libc = ctypes.CDLL(None)
    return bool(libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)) == 0)


def check_room(file: int | Path, needed: int) -> None:
    """Raise ``OSError`` if the file system that has ``file`` has less than ``needed`` bytes free.

    A file in memory passes always: its file system reports no size.
    """
    disk = os.statvfs(file)
    free = disk.f_bavail * disk.f_frsize
    # A file in memory has no disk: that has no blocks.
    if disk.f_blocks and needed > free:
        raise OSError(errno.ENOSPC, f"{needed / MIB:.0f} MiB are needed, {free / MIB:.0f} MiB of the disk are free")


def _want_huge_pages(mapping: mmap.mmap) -> None:
    with suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)


def _punch_hole(fd: int, end: int) -> None:
    """Free the memory of a file's bytes ``[0, end)``. If that fails, they are freed when the file is closed."""
    libc = ctypes.CDLL(None)
    libc.fallocate(fd, PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(end))
