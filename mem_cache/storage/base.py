"""The interface of stores of KV pages: the third tier, after device and host memory.

A page is found by its hash, which covers its whole prefix, the model's fingerprint, the layout and the namespace
(``mem_cache/page_hash.py``). Equal hashes mean equal prefixes. So the contents of a store never become stale, and
instances can share one without asking each other.

A store may be slow, full, dead or wrong. That costs time, but never a wrong token. Each page is checked against its
frame (``frame.py``), and a page that is not right counts as missing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from .frame import Checksummed, Framing


class StoreError(Exception):
    """The store did not do what it was asked for. The message says what to look at."""


class StoreUnavailable(StoreError):
    """The store does not answer: it is dead, out of reach, or slower than its timeout."""


class StoreFull(StoreError):
    """The store takes no more pages; those that it holds can be read."""


class StoreMisconfigured(StoreError):
    """The store can't be used as the options say: refused at start."""


class StoreUsage(NamedTuple):
    """Contents of a store, as far as they are known cheaply (otherwise None), and counts of lost pages."""

    pages: int | None
    nbytes: int | None
    bad_pages: int
    """Pages found corrupt, truncated or foreign since this process began. Each was dropped, or will be overwritten."""
    evicted_pages: int


class StoreRequest(NamedTuple):
    """Where and how a store keeps pages."""

    url: str
    """What ``--hicache-storage-url`` says, never empty."""
    page_bytes: int
    limit: int
    """Maximum bytes of the pages together, for a store that evicts them itself."""
    timeout: float
    """Maximum seconds of one wait for a server."""
    framing: Framing | None = None
    """Framing of stored pages. Without one, pages have a checksum."""


class PageStore(ABC):
    """Pages of ``page_bytes`` by hash (``page_hash.py``). Calls block; they come from one thread at a time."""

    def __init__(self, page_bytes: int, framing: Framing | None = None) -> None:
        """Set the page size and the framing of stored pages; by default, a checksum."""
        self.page_bytes = page_bytes
        self.framing = framing or Checksummed()

    @abstractmethod
    def exists(self, hashes: Sequence[bytes]) -> int:
        """Return how many of the first ``hashes`` are stored, up to the first one that is not. Changes nothing.

        Raises ``StoreUnavailable``.
        """

    @abstractmethod
    def get(self, hashes: Sequence[bytes], into: Sequence[memoryview]) -> int:
        """Read pages into ``into``, writable memory of ``page_bytes`` for each. It counts as a use of them.

        Return how many of the first pages were stored and passed their check. The memory of the others has no meaning.
        Raises ``StoreUnavailable``; no page counts as read then.
        """

    @abstractmethod
    def set(self, hashes: Sequence[bytes], pages: Sequence[memoryview]) -> None:
        """Store pages under their hashes. Pages that are stored already may be left as they are.

        Raises ``StoreUnavailable`` and ``StoreFull``; any of the pages may be stored then.
        """

    @abstractmethod
    def remove(self, hashes: Sequence[bytes]) -> None:
        """Remove the pages with these hashes from the store. Unknown ones are ignored. Raises ``StoreUnavailable``."""

    @abstractmethod
    def probe(self) -> None:
        """Test with minimal effort whether the store can be read and written again. A full store counts as readable.

        Raises ``StoreUnavailable``.
        """

    @abstractmethod
    def keep(self, hashes: Sequence[bytes], until: float) -> int:
        """Ask the store to evict these pages only after all others until the Unix time ``until``; 0: no longer.

        A store that does not choose what it evicts ignores that. Return how many of the first pages are stored. Raises
        ``StoreUnavailable``.
        """

    @abstractmethod
    def usage(self) -> StoreUsage:
        """Return the contents of the store as far as they are known cheaply, and counts of lost pages. The store is not
        asked.
        """

    @abstractmethod
    def close(self) -> None:
        """Close connections and files. Stored pages stay."""
