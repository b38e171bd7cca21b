"""The threads that the CPU kernels run on."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

from ..device.placement import SPIN_US
from ..errors import NotEnoughThreads
from .library import load_library


class Team:
    """``size`` threads, the one that calls a kernel among them; the others sleep while no kernel runs.

    ``cpus`` names a core for each; the calling thread's own binding is its own affair. ``spin_us``: how long a thread
    waits for the others before it sleeps. One kernel at a time. Raises ``NotEnoughThreads``.
    """

    def __init__(self, size: int, cpus: Sequence[int] | None = None, spin_us: int = SPIN_US) -> None:
        library = load_library()
        cores = (ctypes.c_int32 * size)(*cpus[:size]) if cpus is not None else None
        self.size = size
        self.handle: int | None = library.pds_team_new(size, cores, spin_us)
        if self.handle is None:
            raise NotEnoughThreads(
                f"the system does not give {size} compute threads: raise its limit on processes (ulimit -u, pids.max) "
                "or on memory, or choose fewer with --threads"
            )
        self.close = weakref.finalize(self, library.pds_team_free, self.handle)
