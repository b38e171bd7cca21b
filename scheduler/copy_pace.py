"""The cost of copies between the pool and host memory, and how many of them fit into a step.

The worker copies pages between two steps, so every stream waits for them. They are no part of ``forward_ms``, which the
cost model estimates: how long a copy takes is learned here, from the worker's reports. A step's room for prompts is
what these copies leave of its limit, and a prefix in host memory is loaded in pieces that fit.
"""

from __future__ import annotations

import math
from collections import deque

FIRST_BYTES_PER_MS = 2e6
"""Assumed speed before anything was copied."""
MEMORY = 0.9
"""Weight of earlier commands when a further one is done."""
LEAST_LOAD_MS = 1.0
"""Minimum milliseconds of loads per step, even if it has no room: computing their tokens would take far longer."""


class CopyPace:
    """Learned speed of copies, and the loads that one step may still have.

    Copies are counted in parts of pages: one for each group of the layout. ``part_bytes``: size of a typical part.
    """

    def __init__(self, part_bytes: float) -> None:
        self._parts, self._ms = 1.0, part_bytes / FIRST_BYTES_PER_MS
        self._sent: deque[tuple[int, int]] = deque()
        self._counted = 0
        self._room_ms = math.inf

    @property
    def part_ms(self) -> float:
        """Milliseconds that copying one part takes: what one page has in one group of layers."""
        return self._ms / self._parts

    def sent(self, number: int, parts: int) -> None:
        """Note that command ``number`` to copy ``parts`` was sent to the worker, so that ``learn`` knows its size."""
        self._sent.append((number, parts))

    def learn(self, number: int, seconds: float) -> None:
        """Learn the speed from command ``number``, which has taken ``seconds``. Earlier commands without a report are
        dropped.
        """
        while self._sent and self._sent[0][0] <= number:
            sent, parts = self._sent.popleft()
            if sent == number:
                self._parts = self._parts * MEMORY + parts
                self._ms = self._ms * MEMORY + seconds * 1000

    def new_ms(self, total: int) -> float:
        """Estimate the milliseconds of the copies planned since the last call.

        ``total``: parts planned since the start.
        """
        new, self._counted = total - self._counted, total
        return new * self.part_ms

    def limit_loads(self, ms: float) -> None:
        """Limit the loads that ``take`` allows until the next call to ``ms`` milliseconds, but at least
        ``LEAST_LOAD_MS``.
        """
        self._room_ms = max(ms, LEAST_LOAD_MS)

    def take(self, pages: int, parts: int) -> int:
        """Return how many of ``pages`` pages may be loaded within what ``limit_loads`` has left, and deduct their time.

        ``parts``: copies that each page needs, one for each group of layers. At least one page may be loaded unless no
        time is left; then the result is 0.
        """
        ms = max(parts * self.part_ms, 1e-9)
        count = pages if pages * ms <= self._room_ms else max(1, int(self._room_ms / ms))
        count = min(count, pages) if self._room_ms > 0 else 0
        self._room_ms -= count * ms
        return count
