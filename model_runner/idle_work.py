"""What a worker does while it has no work: it commits KV memory ahead, then trims its C heap.

glibc gives back only the end of its heaps by itself, and one small block that lives long keeps everything below it. So
the process would keep what a burst of odd requests has left: lists of biases, readouts, compiled grammars. The limits
of ``runtime/malloc.py`` do not suit the worker: its steps take and free megabytes. It trims its heap instead, after a
second without work, if memory has grown. The next step faults in again what it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..runtime.machine.memory import private_bytes
from ..runtime.malloc import trim

if TYPE_CHECKING:
    from .kv.prefault import PoolPrefault

IDLE_MS = 1000
"""The worker has nothing to do when no message has come for so long."""
GROWN_BYTES = 16 << 20
"""Growth from which the heap is trimmed. Trimming takes some milliseconds, and the next step's faults as long."""


class IdleHeap:
    """Knows how much private memory the process needs while it is idle. For one thread.

    ``size`` returns the private resident bytes of the process; ``trim`` returns free memory to the kernel. What a trim
    leaves is in use, and counts as needed from then on. Otherwise each second without work would bring a trim in vain.
    """

    def __init__(self, size: Callable[[], int] = private_bytes, trim: Callable[[], None] = trim) -> None:
        self._size = size
        self._trim = trim
        self._needed = size()
        self._is_due = False

    @property
    def wait_ms(self) -> int:
        """Milliseconds to wait for work before ``advance`` is called; -1 (no limit) if there was no work since."""
        return IDLE_MS if self._is_due else -1

    def used(self) -> None:
        """Note that the worker has worked."""
        self._is_due = True

    def advance(self) -> None:
        """Trim the heap if memory has grown. The worker calls this when it has had no work for ``wait_ms``."""
        self._is_due = False
        size = self._size()
        if size > self._needed + GROWN_BYTES:
            self._trim()
            self._needed = self._size()
        else:
            self._needed = min(self._needed, size)


class IdleWork:
    """Commits memory with ``prefault`` while the worker is idle, then trims ``heap``. For one thread."""

    def __init__(self, prefault: PoolPrefault, heap: IdleHeap) -> None:
        self._prefault = prefault
        self._heap = heap

    @classmethod
    def of(
        cls, prefault: PoolPrefault, size: Callable[[], int] = private_bytes, trim: Callable[[], None] = trim
    ) -> IdleWork:
        """Make the idle work of this process. ``size``, ``trim``: see ``IdleHeap``.

        What ``prefault`` has committed of a KV pool does not count: if it is private memory, it is no heap.
        """
        return cls(prefault, IdleHeap(lambda: size() - prefault.committed_privately, trim))

    @property
    def wait_ms(self) -> int:
        """Milliseconds to wait for work before ``advance`` is called; -1 (no limit) if there is nothing to do."""
        wait = self._prefault.wait_ms
        return wait if wait >= 0 else self._heap.wait_ms

    def used(self) -> None:
        """Note that the worker has worked."""
        self._heap.used()

    def advance(self) -> None:
        """Do a little. The worker calls this when it has had no work for ``wait_ms``."""
        if self._prefault.wait_ms >= 0:
            self._prefault.advance()
        else:
            self._heap.advance()
