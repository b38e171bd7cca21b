"""Pages of the host that are to be written to the store.

::

    backlog ──(a batch at a time)──▶ storing ──▶ stored; or, if that failed, backlog again
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ..mem_cache.host_tier import HostTier
from ..messages.base import Message, pack_i32
from ..messages.tiers import PagesStored, StorePages
from .tier_counts import TierCounts

BACKLOG_PAGES = 1 << 16
STORE_BATCH = 64
"""Maximum pages under way to the store at a time, which are pinned for it."""
FIRST_PAUSE, MOST_PAUSE = 1.0, 60.0
"""Seconds of pause after the store has refused pages; they double with each failure in a row."""
LASTING_PAUSE = 4.0
"""Seconds of pause from which on an operator should look at the store: the pause after the third failure."""


class Storing(NamedTuple):
    """Pages on their way to the store."""

    hashes: list[bytes]
    pages: list[int]
    asked_at: float


class StoreBacklog:
    """Pages still to be written, those on their way, and those that both the host and the store have.

    ``send`` sends to the worker, with numbers of ``ids``. ``left`` is called with pages that are no longer on their
    way, whether the store has them or not.
    """

    def __init__(
        self,
        host: HostTier,
        counts: TierCounts,
        ids: itertools.count[int],
        send: Callable[[Message], None],
        left: Callable[[Iterable[bytes]], None],
    ) -> None:
        self._host, self._counts, self._ids = host, counts, ids
        self._send, self._left = send, left
        self._backlog: OrderedDict[bytes, None] = OrderedDict()
        self._storing: dict[int, Storing] = {}
        """Batches on their way, in the order of their start."""
        self._stored: set[bytes] = set()
        """Pages that both the host and the store have."""
        self._pause = 0.0
        self._refusal = ""
        """Why the store refused the last batch."""
        self._again_at = 0.0

    def __len__(self) -> int:
        return len(self._backlog)

    def remember(self, page_hash: bytes) -> None:
        """Queue a page of the host to be written to the store, unless the store has it. A full backlog drops its oldest
        page.
        """
        if page_hash in self._stored:
            return
        self._backlog[page_hash] = None
        if len(self._backlog) > BACKLOG_PAGES:
            skipped, _ = self._backlog.popitem(last=False)
            self._counts.skipped += 1
            self._left([skipped])

    def drop(self, hashes: Sequence[bytes]) -> None:
        """Remove pages with bad KV from the backlog, and from the record of what the store has."""
        for page_hash in hashes:
            self._backlog.pop(page_hash, None)
            self._stored.discard(page_hash)
        self._left(hashes)

    def save_first(self, hashes: Sequence[bytes]) -> None:
        """Move those of these pages that are in the backlog to its front."""
        for page_hash in reversed(hashes):
            if page_hash in self._backlog:
                self._backlog.move_to_end(page_hash, last=False)

    def is_saving(self, page_hash: bytes) -> bool:
        """Return whether the page is queued for the store or being written."""
        return page_hash in self._backlog or any(page_hash in batch.hashes for batch in self._storing.values())

    def save_again(self, hashes: Sequence[bytes]) -> None:
        """Queue those of these pages that the host has for the store, which lacks them although it was sent them
        before.
        """
        self._stored.difference_update(hashes)
        for page_hash in hashes:
            if page_hash in self._host:
                self.remember(page_hash)

    def clear(self) -> None:
        """Drop the whole backlog, because the host has lost all its pages."""
        forgotten, self._backlog = self._backlog, OrderedDict()
        self._left(forgotten)

    def send_next(self, now: float) -> None:
        """Order the worker to write the next batch to the store.

        Do nothing while a batch is under way, or in the pause after a failure. The caller makes sure that the store
        answers.
        """
        if self._storing or not self._backlog or now < self._again_at:
            return
        hashes: list[bytes] = []
        pages: list[int] = []
        gone: list[bytes] = []
        while self._backlog and len(hashes) < STORE_BATCH:
            page_hash, _ = self._backlog.popitem(last=False)
            page = self._host.page(page_hash)
            if page is not None:
                hashes.append(page_hash)
                pages.append(page)
            else:
                gone.append(page_hash)
        if hashes:
            self._store(hashes, pages, now)
        self._left(gone)

    def _store(self, hashes: list[bytes], pages: list[int], now: float) -> None:
        store_id = next(self._ids)
        self._host.pin(pages)
        self._storing[store_id] = Storing(hashes, pages, now)
        self._stored.update(hashes)
        packed = pack_i32(np.array(pages, dtype=np.int32))
        self._send(StorePages(store_id, b"".join(hashes), packed))

    def on_stored(self, event: PagesStored, now: float) -> None:
        """Record the result of a batch that was written. After an error, queue its pages again and pause, longer each
        time.
        """
        hashes, pages, _ = self._storing.pop(event.id)
        self._host.unpin(pages)
        self._counts.stored += event.count
        self._counts.store_seconds += event.seconds
        if event.error:
            # Try again, as far as the host has the pages by then.
            self._stored.difference_update(hashes)
            self._backlog.update(dict.fromkeys(hashes))
            self._refusal = event.error
            self._pause = min(MOST_PAUSE, 2 * self._pause or FIRST_PAUSE)
            self._again_at = now + self._pause
        else:
            self._pause = 0.0
            self._left(hashes)
        self._prune()

    def read(self, came: Sequence[bytes], lacking: Sequence[bytes]) -> None:
        """Record which pages a fetch has shown the store to have (``came``), and which it lacks (``lacking``)."""
        # It may have had the missing pages, and lost them: after they are computed, they are written again.
        self._stored.difference_update(lacking)
        self._stored.update(came)
        self._prune()

    def resume(self, now: float) -> None:
        """End the pause after failures at ``now``: the store answers again."""
        self._pause, self._again_at = 0.0, now

    def _prune(self) -> None:
        """Remove pages that the host no longer has from the record of stored ones, if that has become long."""
        if len(self._stored) > 2 * self._host.num_pages:
            self._stored = {page_hash for page_hash in self._stored if page_hash in self._host}

    @property
    def oldest(self) -> Storing | None:
        """The first batch that the store has not answered."""
        return next(iter(self._storing.values()), None)

    @property
    def next_at(self) -> float | None:
        """When the next batch may be sent, as ``time.monotonic()``; None if there is none, or one is under way."""
        return self._again_at if self._backlog and not self._storing else None

    @property
    def problem(self) -> str:
        """Problem that an operator should look at, "" for none: it has refused pages for long."""
        # A store that answers reads may yet be read-only, full of others' files, or gone.
        is_refusing = self._pause >= LASTING_PAUSE
        return f"the KV store refuses pages; serving continues without it: {self._refusal}" if is_refusing else ""


class NoBacklog:
    """The ``StoreBacklog`` of an instance without a store."""

    def __len__(self) -> int:
        return 0

    def remember(self, page_hash: bytes) -> None:
        """Do nothing: there is no store to write the page to."""

    def save_first(self, hashes: Sequence[bytes]) -> None:
        """Do nothing: no page waits to be written."""

    def clear(self) -> None:
        """Do nothing: no page waits to be written."""
