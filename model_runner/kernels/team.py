"""The threads that the CPU kernels run on."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

from .library import load_library


class Team:
    """``size`` threads, the one that calls a kernel among them; the others sleep while no kernel runs.

    ``cpus`` names a core for each; the calling thread's own binding is its own affair. One kernel at a time.
    """

    def __init__(self, size: int, cpus: Sequence[int] | None = None) -> None:
        library = load_library()
        cores = (ctypes.c_int32 * size)(*cpus[:size]) if cpus is not None else None
        self.size = size
        self.handle: int | None = library.pds_team_new(size, cores)
        if self.handle is None:
            raise MemoryError(f"the system does not give {size} threads")
        self.close = weakref.finalize(self, library.pds_team_free, self.handle)
