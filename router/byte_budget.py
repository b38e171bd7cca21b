"""A limit on the bytes that running requests hold together, with a share for each API key."""

from __future__ import annotations

from collections import Counter


class ByteBudget:
    """At most ``limit`` bytes, counted by API key. A key that holds some may hold as many as it leaves free."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        """Bytes that are held now. They exceed the limit where they had arrived before they could be refused."""
        self._of: Counter[str] = Counter()
        """Bytes that each API key holds."""

    def of(self, key: str) -> int:
        """Return the bytes that an API key holds."""
        return self._of[key]

    def fits(self, size: int, key: str, extra: int = 0) -> bool:
        """Return whether ``key`` may hold ``size`` bytes more. ``key``: an API key's name, "" without one.

        ``extra``: bytes by which the limit is higher for them.
        """
        free, of_key = self.limit + extra - self.held - size, self._of[key]
        return free >= 0 and not (key and of_key and of_key + size > free)

    def add(self, size: int, key: str) -> None:
        """Count ``size`` bytes more as held by ``key``; fewer if negative."""
        self.held += size
        self._of[key] += size
        if not self._of[key]:
            del self._of[key]
