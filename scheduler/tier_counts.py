"""What became of KV pages beyond the pool, since the start."""

from __future__ import annotations

from ..messages.outputs import CachedBeyond

NOTHING_BEYOND = CachedBeyond(0, 0)


class TierCounts:
    """Pages, but where it says otherwise."""

    def __init__(self) -> None:
        self.saved = 0
        """To the host."""
        self.loaded = 0
        """From there, into the pool."""
        self.stored = 0
        self.fetched = 0
        self.asked = 0
        """Of the store."""
        self.skipped = 0
        """Not stored: more came than the store takes."""
        self.hit_host = 0
        """Tokens of prompts that were found in host memory when the request got its memory for the first time."""
        self.hit_store = 0
        """The same of those that the store had brought there."""
        self.copy_seconds = 0.0
        self.fetch_seconds = 0.0
        self.store_seconds = 0.0

    def hit(self, found: CachedBeyond) -> None:
        """A request began with these."""
        self.hit_host += found.host
        self.hit_store += found.store
