"""The errors of the KV bookkeeping.

Running out of slots or rows is no error: the allocators return ``None``. These errors mean that the bookkeeping and its
caller disagree about the owner of a page. A retry never helps, and the process must not go on.
"""

from __future__ import annotations


class MemCacheError(Exception):
    """Base of this folder's errors."""


class InvalidFree(MemCacheError):
    """A slot or row was given back that was never handed out (out of range, or in the reserved page 0)."""


class DoubleFree(InvalidFree):
    """A page or row was given back twice."""


class MisplacedSlot(MemCacheError):
    """A slot can't hold the position that it was named for: their offsets in the page differ, or its page is free."""


class UnalignedLength(MemCacheError):
    """A length that must be a whole number of pages is not."""


class StaleMatch(MemCacheError):
    """A ``PrefixMatch`` was used after an eviction or a reset took (part of) it. Hold a match before making room."""


class StaleHold(MemCacheError):
    """A ``KVHold`` was used after it was released, or for more tokens than it has slots for."""


class UnbalancedLock(MemCacheError):
    """A tree node was unlocked more often than it was locked, or was locked after it had left the tree."""


class WindowPagesShort(MemCacheError):
    """More window pages were asked for than a request was promised, or some that a match needs are gone."""


class InvariantViolation(MemCacheError):
    """A page has no owner or several, or a count disagrees with what it counts. The message names page and owners."""
