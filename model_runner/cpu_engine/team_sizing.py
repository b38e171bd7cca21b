"""Fewer compute threads while other processes use their cores.

All threads of a team meet at every barrier of a pass, so the team is as slow as its slowest thread. If one of two
threads has half a core, both compute at half speed. One thread alone, on a core of its own, computes at two thirds. So
the team computes on as many threads as there are cores for it. Results have the same bits on any number of threads.

Linux counts how long each thread was ready to run and waited for a core (``/proc/self/task/*/schedstat``). A team of
fewer threads can't see when the cores are free again, so it tries all of its threads from time to time.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ...runtime.machine.threads import refusal, restrict_thread

log = logging.getLogger(__name__)

WINDOW_SECONDS = 0.1
"""Time that a thread computes or waits for a core, by which the team is sized."""
LOOK_SECONDS = 0.05
"""Least time between two looks at the threads' times."""
LEAST_HOLD_SECONDS, MOST_HOLD_SECONDS = 0.5, 8.0
"""Time with fewer threads, before all of them are tried again. It doubles each time that they still wait for cores."""
GAIN = 0.65
"""Exponent of a pass's speed in the number of threads. Threads share the memory's bandwidth, so it is less than 1.

Measured on two cores: 8 streams of SmolLM2 135M in bfloat16 are 0.64 times as fast on one thread.
"""
SLOWEST = 0.1
"""Part of its speed that a team keeps if others take one core of its threads. More cores leave less, but never none."""
LEAST_GAIN = 1.05
"""Least gain in speed for which threads are left out."""


class ThreadTime(NamedTuple):
    """What a thread has done so far, in seconds."""

    run: float
    """Time on a core."""
    waited: float
    """Time in which it could have run, but had no core."""


def best_size(capacity: int, taken: float) -> int:
    """Return the number of threads that is fastest while others take ``taken`` of ``capacity`` cores from them.

    Each thread that is left out leaves its core to the others. What they take beyond that delays all threads alike.
    """

    def speed(size: int) -> float:
        excess = max(0.0, taken - (capacity - size))
        return float((size / capacity) ** GAIN) * max(1 - excess, SLOWEST / max(1.0, excess))

    best = max(range(1, capacity + 1), key=speed)
    return best if speed(best) > LEAST_GAIN * speed(capacity) else capacity


class Team(Protocol):
    """What a ``TeamSizer`` needs of a team of threads."""

    capacity: int
    cpus: tuple[int, ...] | None

    @property
    def size(self) -> int:
        """Threads that compute."""

    @size.setter
    def size(self, size: int) -> None: ...

    def system_id(self, member: int) -> int:
        """Return the system's id of a thread that is not the caller."""


class TeamSizing:
    """Chooses the size of a team of ``capacity`` threads by their times. It looks at no clock itself."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.size = capacity
        self.is_short = False
        """Whether the threads had too few cores when all of them last computed."""
        self.taken = 0.0
        """Cores that others took in the last window with all threads."""
        self._from: list[ThreadTime] | None = None
        self._hold = LEAST_HOLD_SECONDS
        self._until = 0.0

    def look(self, now: float, times: Sequence[ThreadTime]) -> int:
        """Return the size from now on. ``times``: of all threads, ``now``: in seconds."""
        if self.size < self._capacity:
            if now >= self._until:
                self.size, self._from = self._capacity, None
            return self.size
        if self._from is None:
            self._from = list(times)
            return self.size
        passed = [ThreadTime(t.run - f.run, t.waited - f.waited) for t, f in zip(times, self._from, strict=True)]
        span = max(one.run + one.waited for one in passed)
        if span < WINDOW_SECONDS:
            return self.size
        self._from = list(times)
        self.taken = sum(one.waited for one in passed) / span
        self.size = best_size(self._capacity, self.taken)
        self.is_short = self.size < self._capacity
        if not self.is_short:
            self._hold = LEAST_HOLD_SECONDS
        else:
            self._until = now + self._hold
            self._hold = min(2 * self._hold, MOST_HOLD_SECONDS)
        return self.size


class TeamSizer:
    """Sizes a team before passes, which all come from the thread that makes this."""

    def __init__(self, team: Team) -> None:
        """Begin with all threads. Raises ``OSError`` if the system does not tell how long threads wait."""
        self._cpus, self._sizing = team.cpus, TeamSizing(team.capacity)
        self._was_refused = False
        """Whether a thread could not be moved to its cores, of which the log then has one line."""
        self._threads = [threading.get_native_id(), *map(team.system_id, range(1, team.capacity))]
        self._files: list[int] = []
        try:
            for thread in self._threads:
                self._files.append(os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC))
            self._times()
        except (OSError, ValueError) as error:
            self.close()
            raise OSError(f"the system does not tell how long threads wait for a core: {error}") from error
        self._next_look = 0.0

    def close(self) -> None:
        """Close the files."""
        while self._files:
            os.close(self._files.pop())

    def before_pass(self, team: Team) -> None:
        """Set the size of ``team`` for the next pass."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        was_short = self._sizing.is_short
        if (size := self._sizing.look(now, self._times())) != team.size:
            team.size = size
            self._bind(all_compute=size == team.capacity)
        if self._sizing.is_short == was_short:
            return
        if was_short:
            log.info("all %d compute threads have their cores again", team.capacity)
        else:
            taken = f"other processes take {self._sizing.taken:.1f} cores from the {team.capacity} compute threads"
            log.info("%s: %d of them compute until the cores are free again", taken, size)

    def _bind(self, *, all_compute: bool) -> None:
        """Bind each thread to its core if all compute. Else none is bound, as its core may be the one that is taken.

        If a core has left the process's cpuset, its thread stays unbound. It then shares another thread's core, which
        is what this object watches for.
        """
        if self._cpus is None:
            return
        for thread, cpu in zip(self._threads, self._cpus, strict=True):
            cores = {cpu} if all_compute else set(self._cpus)
            if not restrict_thread(thread, cores) and not self._was_refused:
                self._was_refused = True
                log.warning("%s", refusal(cores))

    def _times(self) -> list[ThreadTime]:
        found = []
        for file in self._files:
            run, waited, _ = os.pread(file, 100, 0).split()
            found.append(ThreadTime(int(run) / 1e9, int(waited) / 1e9))
        return found
