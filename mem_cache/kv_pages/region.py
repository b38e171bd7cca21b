"""The memory that KV pages live in: one contiguous, page-aligned buffer per model worker.

A shared region is a sealed memfd. It has no name in any file system, so nothing is left behind whatever is killed. A
peer that holds its descriptor can map and write it, but can't change its size under us, which would turn our next
access into SIGBUS. A private region is anonymous memory. Both commit a page of memory only when it is first touched.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from dataclasses import dataclass
from typing import Protocol

_MADV_POPULATE_WRITE = 23
_MAP_NORESERVE = 0x4000
"""linux/mman.h; Python's ``mmap`` doesn't name them yet."""


class RegionError(Exception):
    """The KV pool's memory can't be reserved or given back, or is not fit for the transfer backend."""


class Region(Protocol):
    """Interface to ``nbytes`` of memory from which pages are written to peers. ``fd`` is None if they can't map it."""

    @property
    def nbytes(self) -> int: ...

    @property
    def fd(self) -> int | None: ...

    @property
    def address(self) -> int: ...

    def view(self) -> memoryview:
        """Return a writable view of all bytes."""
        ...


@dataclass(eq=False)
class HostMemory:
    """A region in host memory that its allocator keeps."""

    memory: memoryview
    fd: int | None = None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.memory.nbytes

    @property
    def address(self) -> int:
        """Address of byte 0 in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def view(self) -> memoryview:
        """Return a new writable view of all bytes of ``memory``, without a copy."""
        return self.memory[:]


@dataclass(eq=False)
class KVRegion:
    """A region of ``nbytes`` bytes, zeroed at first. ``fd`` is None if it is not shared.

    ``buffer`` is writable and usable with ``torch.frombuffer``.
    """

    buffer: mmap.mmap
    nbytes: int
    fd: int | None

    @property
    def address(self) -> int:
        """Address of byte 0 in this process, for libraries that take pointers. Valid until ``close``."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))

    @property
    def device(self) -> str:
        """Device of the memory, as torch names it."""
        return "cpu"

    def view(self) -> memoryview:
        """Return a writable view of all bytes. The memory can't be unmapped before the view is released."""
        return memoryview(self.buffer)

    def commit(self, begin: int, end: int) -> bool:
        """Take the memory of bytes ``[begin, end)`` from the system now, instead of page by page at the first write.

        Contents stay unchanged, even while a peer writes them. ``begin`` must be aligned to a memory page. Return False
        if the system can't do it: a kernel before Linux 5.14, or no memory left. That is harmless.
        """
        try:
            self.buffer.madvise(_MADV_POPULATE_WRITE, begin, end - begin)
        except OSError:
            return False
        return True

    def give_back(self, begin: int = 0) -> None:
        """Return the memory from byte ``begin`` on (rounded up to a memory page) to the system; addresses stay
        reserved.

        The bytes are zero from now on, and memory is taken anew as they are touched. For a shared region this holds in
        every process that maps it. Raises ``RegionError``.
        """
        begin = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        if begin >= self.nbytes:
            return
        try:
            self.buffer.madvise(mmap.MADV_DONTNEED if self.fd is None else mmap.MADV_REMOVE, begin, self.nbytes - begin)
        except OSError as e:
            raise RegionError(f"the system does not take the KV pool's memory back: {e.strerror}") from e

    def close(self) -> None:
        """Close the descriptor and unmap the memory. While a tensor or view uses it, it stays mapped."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        try:
            self.buffer.close()
        except BufferError:
            # An array still exports the buffer. It keeps the mapping alive and frees it when it goes; closing
            # it under the array would turn the next access into a crash.
            return


def allocate_region(nbytes: int, *, shared: bool) -> KVRegion:
    """Reserve ``nbytes`` zeroed bytes, which peers on this host can map if ``shared``. Raises ``RegionError``.

    Memory is taken from the system only as it is touched.
    """
    if nbytes <= 0:
        raise RegionError(f"a KV region needs at least one byte, not {nbytes}")
    try:
        return _allocate_shared(nbytes) if shared else _allocate_private(nbytes)
    except OSError as e:
        raise RegionError(
            f"can't reserve {nbytes / 2**30:.2f} GiB for the KV pool: {e.strerror}. "
            "Choose a smaller --max-total-tokens, --max-total-tokens-limit or --mem-fraction-static."
        ) from e


def _allocate_private(nbytes: int) -> KVRegion:
    # Without MAP_PRIVATE Python maps anonymous memory shared, which huge pages and swap treat worse.
    # MAP_NORESERVE: a pool's maximum size may exceed the host's memory, because only touched pages count.
    buffer = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    return KVRegion(buffer, nbytes, None)


def _allocate_shared(nbytes: int) -> KVRegion:
    fd = os.memfd_create("pdserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        buffer = mmap.mmap(fd, nbytes)
    except BaseException:
        # Broad: whatever is raised, an interrupt included, the descriptor and its memory must not stay.
        os.close(fd)
        raise
    return KVRegion(buffer, nbytes, fd)


def map_region(fd: int, nbytes: int) -> KVRegion:
    """Map a shared region that another process of this host reserved. Raises ``RegionError``.

    The returned region owns ``fd``, which is closed if it can't be mapped.
    """
    try:
        return KVRegion(mmap.mmap(fd, nbytes), nbytes, fd)
    except (OSError, ValueError, OverflowError) as e:
        os.close(fd)
        raise RegionError(f"the KV pool of {nbytes / 2**30:.2f} GiB can't be mapped: {e}") from e
