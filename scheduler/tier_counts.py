"""Counts of KV pages that were moved to other tiers and back, since the start."""

from __future__ import annotations

from ..messages.outputs import CachedBeyond

NOTHING_BEYOND = CachedBeyond(0, 0)


class TierCounts:
    """Counts since the start, in pages unless stated otherwise."""

    def __init__(self) -> None:
        self.saved = 0
        """Pages saved to host memory."""
        self.loaded = 0
        """Pages loaded from host memory into the pool."""
        self.stored = 0
        self.fetched = 0
        self.asked = 0
        """Pages asked of the store."""
        self.skipped = 0
        """Pages not stored because more came than the store takes."""
        self.hit_host = 0
        """Prompt tokens found in host memory when their request got memory for the first time."""
        self.hit_store = 0
        """Part of these prompt tokens that the store had just brought to host memory."""
        self.copy_seconds = 0.0
        self.fetch_seconds = 0.0
        self.store_seconds = 0.0

    def hit(self, found: CachedBeyond) -> None:
        """Count the prompt tokens that a request found in other tiers than the pool."""
        self.hit_host += found.host
        self.hit_store += found.store
