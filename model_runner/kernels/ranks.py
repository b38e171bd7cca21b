"""What the tensor-parallel ranks of a host share: the memory in which the CPU engines add up their parts of a sum.

Rank 0 makes it, and the others map it by its descriptor. It is a memfd: it has no name, and is gone with the last rank.
Room for the longest pass is reserved, and memory is taken as passes first need it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

from .library import load_library

PANEL = 32
"""``kPanel`` of linear.h: rows of the residual are padded to it."""


class NativeRanks:
    """Rank ``rank`` of ``size``; passes have up to ``tokens`` tokens, of ``hidden`` and ``vocab`` elements.

    ``fd``: of memory that rank 0 has made, whose own is None. Raises ``OSError`` where there is no memory.
    """

    def __init__(self, rank: int, size: int, tokens: int, hidden: int, vocab: int, fd: int | None = None) -> None:
        library = load_library()
        self.rank, self.size, self.tokens = rank, size, tokens
        part_floats = tokens * (-(-hidden // PANEL) * PANEL)
        nbytes = library.pds_ranks_bytes(size, part_floats, tokens * vocab)
        self.fd = os.memfd_create("pdserve-ranks", os.MFD_CLOEXEC) if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, nbytes)
        self._memory = mmap.mmap(self.fd, nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.handle: int | None = library.pds_ranks_new(address, rank, size, part_floats)
        if self.handle is None:
            raise MemoryError
        self.close = weakref.finalize(self, library.pds_ranks_free, self.handle)
