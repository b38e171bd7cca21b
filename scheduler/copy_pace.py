"""What copies between the pool and host memory cost, and how much of them a step has room for.

The worker copies pages between two steps, so every stream waits for them. They are no part of ``forward_ms``, which the
cost model foresees: how long a copy takes is learned here, from what the worker reports. A step's room for prompts is
what these copies leave of its limit, and what a request finds in host memory is loaded in pieces that fit.
"""

from __future__ import annotations

import math
from collections import deque

FIRST_BYTES_PER_MS = 2e6
"""Before anything was copied."""
MEMORY = 0.9
"""Weight of what is known already when a further command was done."""
LEAST_LOAD_MS = 1.0
"""Worth of pages that a step may load even where it has no room: computing their tokens would take far longer."""


class CopyPace:
    """Learns, and keeps the books of one step. Copies are counted in parts of pages: one for each group of the layout.

    ``part_bytes``: of a typical part.
    """

    def __init__(self, part_bytes: float) -> None:
        self._parts, self._ms = 1.0, part_bytes / FIRST_BYTES_PER_MS
        self._sent: deque[tuple[int, int]] = deque()
        self._counted = 0
        self._room_ms = math.inf

    @property
    def part_ms(self) -> float:
        """Milliseconds that copying one part takes."""
        return self._ms / self._parts

    def sent(self, number: int, parts: int) -> None:
        """The worker was sent a command to copy ``parts``."""
        self._sent.append((number, parts))

    def learn(self, number: int, seconds: float) -> None:
        """The command is done."""
        while self._sent and self._sent[0][0] <= number:
            sent, parts = self._sent.popleft()
            if sent == number:
                self._parts = self._parts * MEMORY + parts
                self._ms = self._ms * MEMORY + seconds * 1000

    def new_ms(self, total: int) -> float:
        """What the copies take that came since this was last asked. ``total``: parts since the start."""
        new, self._counted = total - self._counted, total
        return new * self.part_ms

    def limit_loads(self, ms: float) -> None:
        """Load no more than what takes so long until this is called again."""
        self._room_ms = max(ms, LEAST_LOAD_MS)

    def take(self, pages: int, parts: int) -> int:
        """How many of ``pages``, each of so many ``parts``, may be loaded now."""
        ms = max(parts * self.part_ms, 1e-9)
        count = pages if pages * ms <= self._room_ms else max(1, int(self._room_ms / ms))
        count = min(count, pages) if self._room_ms > 0 else 0
        self._room_ms -= count * ms
        return count
