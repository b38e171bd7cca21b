"""The threads that the CPU kernels run on."""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Sequence

from ..device.placement import SPIN_US
from ..errors import NotEnoughThreads
from .library import load_library
from .team_sizing import TeamSizer

log = logging.getLogger(__name__)


class Team:
    """``capacity`` threads, the one that calls a kernel among them; the others sleep while no kernel runs.

    ``cpus`` names a core for each; the calling thread's own binding is its own affair. ``spin_us``: how long a thread
    waits for the others before it sleeps. ``adapts``: passes use fewer threads while other processes take their cores.
    One kernel at a time. Raises ``NotEnoughThreads``.
    """

    def __init__(
        self, capacity: int, cpus: Sequence[int] | None = None, spin_us: int = SPIN_US, *, adapts: bool = False
    ) -> None:
        self._library = load_library()
        self.capacity = self._size = capacity
        self.cpus = None if cpus is None else tuple(cpus[:capacity])
        cores = None if self.cpus is None else (ctypes.c_int32 * capacity)(*self.cpus)
        self.handle: int | None = self._library.pds_team_new(capacity, cores, spin_us)
        if self.handle is None:
            raise NotEnoughThreads(
                f"the system does not give {capacity} compute threads: raise its limit on processes (ulimit -u, "
                "pids.max) or on memory, or choose fewer with --threads"
            )
        self.close = weakref.finalize(self, self._library.pds_team_free, self.handle)
        self._adapts = adapts and capacity > 1
        self._sizer: TeamSizer | None = None

    @property
    def size(self) -> int:
        """Threads that compute. Results do not depend on it."""
        return self._size

    @size.setter
    def size(self, size: int) -> None:
        if not 1 <= size <= self.capacity:
            raise ValueError(f"a team of {self.capacity} threads can't compute on {size}")
        self._size = size
        self._library.pds_team_set_size(self.handle, size)

    def system_id(self, member: int) -> int:
        """Return the system's id of a thread's; ``member`` is 1 or more, as the caller is member 0."""
        return int(self._library.pds_team_system_id(self.handle, member))

    def begin_pass(self) -> None:
        """Adapt the team to the cores that other processes leave it. For the thread that computes all passes."""
        if not self._adapts:
            return
        if self._sizer is None:
            try:
                self._sizer = TeamSizer(self)
            except OSError as error:
                self._adapts = False
                log.info("compute threads do not adapt to other processes: %s", error)
                return
            weakref.finalize(self, self._sizer.close)
        self._sizer.before_pass(self)
