"""KV pages that are to stay in the store for later, and the callers that wait for the confirmation.

An order is SAVING → READY → KEEPING → done. While SAVING, its pages are on their way to the host and the store. While
KEEPING, the store is asked which it has, and to keep them. If the store lacks some that the host has, they are sent
once more. The caller gets its answer after ``MOST_SECONDS`` at the latest: a store that is slow or dead costs the
pages, but not the answer.

A tick looks only at what is due in it, however many orders wait. An order that is SAVING waits for one page at a time.
It moves to the next page when that one has ``left``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ..messages.tiers import KeepPages, PagesKept

MOST_SECONDS = 20.0
TRIES = 2


class Kept(NamedTuple):
    """Number of the first pages that are in the store; ``problem`` is set if those are not all."""

    pages: int
    problem: str = ""


class SavesPages(Protocol):
    """Interface to the backlog of pages to be saved."""

    def is_saving(self, page_hash: bytes) -> bool:
        """Return whether the page is still on its way to the store."""

    def save_again(self, hashes: Sequence[bytes]) -> None:
        """Save these pages again: the store lacks them, although they were recorded as saved."""


class AsksStore(Protocol):
    """Interface to the link to the store."""

    def tell_store(self, message: KeepPages) -> None:
        """Send an order to keep pages, or to keep them no more, to the store."""

    def problem(self, now: float) -> str:
        """Return what is wrong with the store, "" for nothing."""


@dataclass(slots=True, eq=False)
class _KeepOrder:
    hashes: list[bytes]
    until: float
    deadline: float
    done: Callable[[Kept], None] | None
    """Callback for the result; None after it was called."""
    saved: int = 0
    """Number of the first pages that are no longer on their way."""
    tries: int = 0
    asked: int = 0
    """Id of the latest ``KeepPages``."""


class KeptPages:
    """Owner of the open orders. ``next_id`` returns ids for messages to the worker."""

    def __init__(self, backlog: SavesPages, link: AsksStore, next_id: Callable[[], int]) -> None:
        self._backlog = backlog
        self._link = link
        self._next_id = next_id
        self._orders: deque[_KeepOrder] = deque()
        """Orders by arrival, hence by deadline. Orders that are done are removed when they are first."""
        self._saving: dict[bytes, set[_KeepOrder]] = {}
        """Orders that are SAVING, by the page that each waits for."""
        self._ready: list[_KeepOrder] = []
        self._keeping: dict[int, _KeepOrder] = {}

    def want(self, hashes: list[bytes], until: float, now: float, done: Callable[[Kept], None]) -> None:
        """Have the store keep these pages, which are being saved, until the time ``until``.

        ``done`` is called once, after ``MOST_SECONDS`` at the latest. Its argument says how many of the first pages are
        kept, and why not all.
        """
        order = _KeepOrder(hashes, until, now + MOST_SECONDS, done)
        self._orders.append(order)
        self._wait(order)

    def release(self, hashes: list[bytes]) -> None:
        """Let the store evict these pages, which it kept until now. There is no report on that."""
        self._link.tell_store(KeepPages(self._next_id(), b"".join(hashes), 0.0))

    def left(self, hashes: Iterable[bytes]) -> None:
        """Note that these pages are no longer on their way to the store: they were saved, lost or given up."""
        for page_hash in hashes:
            for order in self._saving.pop(page_hash, ()):
                self._wait(order)

    def advance(self, now: float) -> None:
        """Order the store to keep what was saved since the last tick, and end orders that exceeded their deadline."""
        while self._orders and (self._orders[0].done is None or now > self._orders[0].deadline):
            order = self._orders.popleft()
            if order.done is not None:
                late = f"the KV store did not take the pages within {MOST_SECONDS:.0f} s"
                self._end(order, Kept(0, "; ".join(filter(None, (late, self._link.problem(now))))))
        ready, self._ready = self._ready, []
        for order in ready:
            if order.done is not None:
                order.asked = self._next_id()
                order.tries += 1
                self._keeping[order.asked] = order
                self._link.tell_store(KeepPages(order.asked, b"".join(order.hashes), order.until))

    def on_kept(self, event: PagesKept) -> None:
        """Handle the store's answer, how many of an order's first pages it has.

        If it lacks some, they are saved once more. Otherwise, or after ``TRIES``, the order's ``done`` is called.
        """
        order = self._keeping.pop(event.id, None)
        if order is None:
            return
        if event.count < len(order.hashes) and not event.error and order.tries < TRIES:
            self._backlog.save_again(order.hashes[event.count :])
            order.saved = event.count
            self._wait(order)
            return
        short = "" if event.count == len(order.hashes) else event.error or "host memory or the KV store has no room"
        self._end(order, Kept(event.count, short))

    def timeout(self, now: float) -> float | None:
        """Return the seconds until the next deadline, None without orders.

        An order that is done may count for a while.
        """
        return max(0.0, self._orders[0].deadline - now) if self._orders else None

    def _wait(self, order: _KeepOrder) -> None:
        """Let the order wait for its first page that is still on its way to the store. If none is, mark the order
        ready.
        """
        while order.saved < len(order.hashes):
            page_hash = order.hashes[order.saved]
            if self._backlog.is_saving(page_hash):
                self._saving.setdefault(page_hash, set()).add(order)
                return
            order.saved += 1
        self._ready.append(order)

    def _end(self, order: _KeepOrder, kept: Kept) -> None:
        self._keeping.pop(order.asked, None)
        if order.saved < len(order.hashes) and (others := self._saving.get(order.hashes[order.saved])) is not None:
            others.discard(order)
            if not others:
                del self._saving[order.hashes[order.saved]]
        done, order.done = order.done, None
        assert done is not None
        done(kept)


class NoKeptPages:
    """The ``KeptPages`` of an instance without a store."""

    def want(self, hashes: list[bytes], until: float, now: float, done: Callable[[Kept], None]) -> None:
        """Call ``done`` at once with 0 pages and the reason: this instance has no KV store."""
        done(Kept(0, "this instance has no KV store"))

    def release(self, hashes: list[bytes]) -> None:
        """Do nothing: there is no store that could evict the pages."""
