"""Messages about KV pages that lie elsewhere than in the pool: in host memory (the second tier) and stores (the third).

They travel the worker's own channel, in one order with the steps. So a copy finds what the steps before it computed,
and what it overwrites the steps behind it have no use for. Stores are read and written by a thread of their own, which
is asked in the same order and answers when it is done.
"""

from __future__ import annotations

from enum import IntEnum

from .base import Message


class PageCopy(IntEnum):
    """Which way, and of which group of the layout's pages: the first, or that behind a window. A host page has a part
    for each.
    """

    TO_HOST = 0
    TO_POOL = 1
    WINDOW_TO_HOST = 2
    WINDOW_TO_POOL = 3

    @property
    def group(self) -> int:
        """Its place in ``KVLayout.groups``."""
        return self >> 1

    @property
    def to_pool(self) -> bool:
        """Or from it."""
        return bool(self & 1)


class CopyPages(Message):
    """Scheduler → worker: copy whole pages, in this order. ``copies`` (int32 triples): what is copied, a ``PageCopy``;
    the page of the pool, or of the pool behind windows; the host's page. Answered by ``PagesCopied``.
    """

    id: int
    copies: bytes


class PagesCopied(Message):
    """Worker → scheduler: everything up to ``CopyPages.id`` was copied; ``seconds`` is what the last one took."""

    id: int
    seconds: float


class StorePages(Message):
    """Scheduler → worker: write host pages (int32) to the store, each under its hash (16 bytes, one after another).

    Answered by ``PagesStored``; nobody overwrites the pages before.
    """

    id: int
    hashes: bytes
    pages: bytes


class PagesStored(Message):
    """Worker → scheduler: the pages of ``StorePages`` are read no more. ``count``: all of them are stored, or 0."""

    id: int
    count: int
    seconds: float
    error: str = ""


class FetchPages(Message):
    """Scheduler → worker: read pages from the store into host pages (int32). Answered by ``PagesFetched``."""

    id: int
    hashes: bytes
    pages: bytes


class PagesFetched(Message):
    """Worker → scheduler: the pages of ``FetchPages`` are written no more; the first ``count`` hold what was asked."""

    id: int
    count: int
    seconds: float
    error: str = ""


class FindPages(Message):
    """Scheduler → worker: how many of the first of these does the store have? Changes nothing. Answered by
    ``PagesFound``.
    """

    id: int
    hashes: bytes


class PagesFound(Message):
    """Worker → scheduler: the store has the first ``count`` of the pages of ``FindPages``; whether they are right is
    found when they are read.
    """

    id: int
    count: int
    error: str = ""


class DropPages(Message):
    """Scheduler → worker: what these hashes name in the store is bad. No answer."""

    hashes: bytes


class KeepPages(Message):
    """Scheduler → worker: what these hashes name is to stay in the store until then (Unix time), as far as the store
    can choose; 0: no longer than anything else. Answered by ``PagesKept``.
    """

    id: int
    hashes: bytes
    until: float


class PagesKept(Message):
    """Worker → scheduler: the first ``count`` of the pages of ``KeepPages`` are there."""

    id: int
    count: int
    error: str = ""


class StoreState(Message):
    """Worker → scheduler: whether the store is asked (``breaker``: closed), or left alone since it fails (``reason``).

    Told when it changes, and with the counts of what it holds now and then; -1: it can't say.
    """

    breaker: str
    reason: str
    pages: int = -1
    nbytes: int = -1
    bad_pages: int = 0
    evicted_pages: int = 0


TierCommand = CopyPages | StorePages | FetchPages | FindPages | DropPages | KeepPages
TierEvent = PagesCopied | PagesStored | PagesFetched | PagesFound | PagesKept | StoreState
