"""Messages about KV pages outside the pool: in host memory (the second tier) and in stores (the third).

They share one ordered channel to the worker with the steps. So a copy finds what earlier steps have computed, and later
steps find what it has written. A separate thread reads and writes stores. It gets its commands in the same order, and
answers when it is done.
"""

from __future__ import annotations

from enum import IntEnum

from .base import Message


class PageCopy(IntEnum):
    """Direction of a copy, and the group of pages: the first one, or the one with a window. A host page has a part for
    each group.
    """

    TO_HOST = 0
    TO_POOL = 1
    WINDOW_TO_HOST = 2
    WINDOW_TO_POOL = 3

    @property
    def group(self) -> int:
        """Return the index in ``KVLayout.groups`` of the group that the copied pages are of."""
        return self >> 1

    @property
    def to_pool(self) -> bool:
        """Return whether the copy goes to the pool, rather than to host memory."""
        return bool(self & 1)


class CopyPages(Message):
    """Scheduler → worker: copy whole pages, in this order. Answered by ``PagesCopied``."""

    id: int
    copies: bytes
    """Triples of int32: a ``PageCopy``, the page of the pool or of the window pool, and the page of the host."""


class PagesCopied(Message):
    """Worker → scheduler: every command up to ``CopyPages.id`` is done. The last one took ``seconds``."""

    id: int
    seconds: float


class StorePages(Message):
    """Scheduler → worker: write host pages to the store. Answered by ``PagesStored``, before which no page changes."""

    id: int
    hashes: bytes
    """Hashes of the pages, 16 bytes each, one after another."""
    pages: bytes
    """Numbers of the host pages (int32)."""


class PagesStored(Message):
    """Worker → scheduler: the pages of ``StorePages`` are no longer read."""

    id: int
    count: int
    """Number of stored pages: all of them, or 0."""
    seconds: float
    error: str = ""


class FetchPages(Message):
    """Scheduler → worker: read pages from the store into host pages (int32). Answered by ``PagesFetched``."""

    id: int
    hashes: bytes
    pages: bytes


class PagesFetched(Message):
    """Worker → scheduler: the pages of ``FetchPages`` are no longer written. The first ``count`` of them are right."""

    id: int
    count: int
    seconds: float
    error: str = ""


class FindPages(Message):
    """Scheduler → worker: count the first pages that the store has. Changes nothing. Answered by ``PagesFound``."""

    id: int
    hashes: bytes


class PagesFound(Message):
    """Worker → scheduler: the store has the first ``count`` pages of ``FindPages``. They are not verified yet."""

    id: int
    count: int
    error: str = ""


class DropPages(Message):
    """Scheduler → worker: remove these pages from the store, because they are bad. There is no answer."""

    hashes: bytes


class KeepPages(Message):
    """Scheduler → worker: keep these pages in the store, as far as it has a choice. Answered by ``PagesKept``."""

    id: int
    hashes: bytes
    until: float
    """Unix time until which they are kept; 0: no longer than other pages."""


class PagesKept(Message):
    """Worker → scheduler: the store has the first ``count`` pages of ``KeepPages``."""

    id: int
    count: int
    error: str = ""


class StoreState(Message):
    """Worker → scheduler: state of the store. Sent when it changes, and now and then with new counts."""

    breaker: str
    """State of its circuit breaker: a store that fails gets no requests for a time."""
    reason: str
    """Why the breaker is open."""
    pages: int = -1
    """Stored pages; -1 if the store cannot count them."""
    nbytes: int = -1
    """Stored bytes; -1 if the store cannot count them."""
    bad_pages: int = 0
    evicted_pages: int = 0


TierCommand = CopyPages | StorePages | FetchPages | FindPages | DropPages | KeepPages
TierEvent = PagesCopied | PagesStored | PagesFetched | PagesFound | PagesKept | StoreState
