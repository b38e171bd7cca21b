"""The memory that KV pages live in: one contiguous, page-aligned buffer per model worker.

A shared region is a sealed memfd: it has no name in any file system, so nothing is left behind whatever is killed, and
a peer that holds its descriptor can map and write it, but can't change its size under us (which would turn our next
access into SIGBUS). A private region is anonymous memory. Both commit a page of memory only when it is first touched.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from dataclasses import dataclass
from typing import Protocol

from ..errors import RegionError

_MADV_POPULATE_WRITE = 23
_MAP_NORESERVE = 0x4000
"""linux/mman.h; Python's ``mmap`` doesn't name them yet."""


class Region(Protocol):
    """``nbytes`` of the host's, from where pages are written to peers. ``fd`` only where they can map it."""

    @property
    def nbytes(self) -> int: ...

    @property
    def fd(self) -> int | None: ...

    @property
    def address(self) -> int: ...

    def view(self) -> memoryview:
        """A writable view of all bytes."""
        ...


@dataclass(eq=False)
class HostMemory:
    """Memory that somebody else allocated, and keeps."""

    memory: memoryview
    fd: int | None = None

    @property
    def nbytes(self) -> int:
        """Of all of it."""
        return self.memory.nbytes

    @property
    def address(self) -> int:
        """Of byte 0 in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def view(self) -> memoryview:
        """See ``Region``."""
        return self.memory[:]


@dataclass(eq=False)
class KVRegion:
    """``nbytes`` zeroed bytes. ``buffer`` is writable and usable with ``torch.frombuffer``; ``fd`` only if shared."""

    buffer: mmap.mmap
    nbytes: int
    fd: int | None

    @property
    def address(self) -> int:
        """Of byte 0 in this process, for libraries that take pointers. Valid until ``close``."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))

    @property
    def device(self) -> str:
        """Whose memory it is."""
        return "cpu"

    def view(self) -> memoryview:
        """A writable view of all bytes; the memory can't be unmapped before it is released."""
        return memoryview(self.buffer)

    def commit(self, begin: int, end: int) -> bool:
        """Have memory behind bytes ``[begin, end)`` now, and not page by page when each is first written.

        Contents stay as they are, also when a peer is writing them. ``begin`` on a memory page's border. False where
        that can't be had, which is no harm: a kernel before Linux 5.14, or no memory left.
        """
        try:
            self.buffer.madvise(_MADV_POPULATE_WRITE, begin, end - begin)
        except OSError:
            return False
        return True

    def give_back(self, begin: int = 0) -> None:
        """Let the system have the memory from byte ``begin`` on (rounded up to its pages); the bytes are zero from now
        on, and committed anew as they are touched, at the same addresses. Of a shared region that is so for whoever
        maps it. Raises ``RegionError``.
        """
        begin = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        if begin >= self.nbytes:
            return
        try:
            self.buffer.madvise(mmap.MADV_DONTNEED if self.fd is None else mmap.MADV_REMOVE, begin, self.nbytes - begin)
        except OSError as e:
            raise RegionError(f"the system does not take the KV pool's memory back: {e.strerror}") from e

    def close(self) -> None:
        """Close the descriptor and unmap; memory that a tensor or view still uses is unmapped with the last of them."""
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
    """Reserve ``nbytes`` zeroed bytes, which peers on this host can map if ``shared``; raises ``RegionError``."""
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
    # What a pool may grow to can be more than the host has: only what is touched counts.
    buffer = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    return KVRegion(buffer, nbytes, None)


def _allocate_shared(nbytes: int) -> KVRegion:
    fd = os.memfd_create("pdserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        buffer = mmap.mmap(fd, nbytes)
    except OSError:
        os.close(fd)
        raise
    return KVRegion(buffer, nbytes, fd)


def map_region(fd: int, nbytes: int) -> KVRegion:
    """A shared region that another process of this host has reserved; ``fd`` is ours. Raises ``RegionError``."""
    try:
        return KVRegion(mmap.mmap(fd, nbytes), nbytes, fd)
    except (OSError, ValueError) as e:
        raise RegionError(f"the KV pool of {nbytes / 2**30:.2f} GiB can't be mapped: {e}") from e
