"""Pages of the layers with a sliding window: which full page has one, and when it is freed.

Rows, slots and the prefix tree name *full* pages, of the layers that see every token. Windowed layers store the same
tokens in *window pages*, of a pool of their own. ``page_of`` maps full pages to window pages.

A full page gets its window page when a step is planned that writes it, not when it is handed out. A long prompt has all
of its full pages from the beginning. At a time it only needs window pages for one piece, and for the window before it.

Each window page is in one state:

========  =======================  ==============================  ==================================================
state     attached to              used by                         freed
========  =======================  ==============================  ==================================================
free      nothing                  no hold                         is free
used      one full page in use     holds with spans that cover it  never, as long as there is one
idle      one full page in use     no hold; a match may need it    with its full page; or when pages are short, longest
                                                                   idle first
========  =======================  ==============================  ==================================================

A hold's *span* is a run of its row's pages. It reaches from the window of the next token it computes to the last token
it has planned. It moves on when its next step is planned. Pages that leave it may be overwritten in that step, because
no token of the step sees them. A full page with a cached prefix may be in the spans of several holds.

No hold runs short in the middle. Each hold is *promised* the pages that its next token needs, wherever it is. Longer
spans get pages that are not promised, and some pages are never promised for this purpose. The sum of
max(promised, span) never exceeds the pool.

The pool may become smaller (``resize``). Pages beyond its end are dropped as soon as no span has them. Promises never
exceed the smaller pool, so a hold always finds a page within the end.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ..messages.base import I32
from .errors import InvalidFree, UnalignedLength, WindowPagesShort
from .pages import slots_to_pages


@dataclass(slots=True)
class WindowSpan:
    """Span of a hold: it uses the window pages of ``[begin, end)`` of its row, and is promised ``promised`` pages.

    With a hand-over that reads them, no page from ``kept_from`` on leaves the span; None: there is no such hand-over.
    """

    begin: int = 0
    end: int = 0
    promised: int = 0
    kept_from: int | None = None

    @property
    def committed(self) -> int:
        """Number of window pages that no other hold can get: those in the span, or the promised ones if more."""
        return max(self.promised, self.end - self.begin)

    def must_move(self, kv_len: int, page_size: int) -> bool:
        """Return whether the span does not suit a decoding request of ``kv_len`` tokens, so that it must move.

        That is so if the last token begins a page, or if the span is longer than promised, as after a prompt's last
        piece.
        """
        return self.end * page_size < kv_len or self.end - self.begin > self.promised


class Windowed(Protocol):
    """A hold, as far as windows are concerned."""

    kv_len: int
    window: WindowSpan


H = TypeVar("H", bound=Windowed)


class WindowAccounts(NamedTuple):
    """The pool's accounts, for checks."""

    num_pages: int
    most_pages: int
    beyond: int
    committed: int
    page_of: I32
    free: list[int]
    """Free window pages, in no particular order."""
    idle: list[int]
    """Full pages with idle window pages."""
    uses: I32
    """Number of spans that have each full page."""


class WindowPages:
    """Owner of ``num_slots // page_size`` window pages, numbered from 1, for full pages ``1 … num_full_pages``.

    In the layer that sees most, a token sees itself and the ``window - 1`` tokens before it. Arrays named ``pages``
    ([N] int32) are full pages, none twice. ``row``: the slots of a request, by position.
    """

    groups = 2
    """Groups of KV that a page consists of: of the layers that see every token, and of those with windows."""

    def __init__(self, window: int, num_slots: int, num_full_pages: int, page_size: int, slack: int = 0) -> None:
        """Set up a pool of ``num_slots`` slots. ``slack`` pages of it are promised only if nothing else is promised."""
        if window < 1 or num_slots % page_size:
            raise UnalignedLength(f"a window of {window} over {num_slots} slots in pages of {page_size}")
        self.window, self.page_size = window, page_size
        self.num_pages = num_slots // page_size
        self.most_pages = self.num_pages
        """Maximum that ``resize`` can restore."""
        self.beyond = 0
        """Number of pages in spans that are beyond the pool's end, because it became smaller."""
        self.reach = -(-(window - 1) // page_size)
        """Number of earlier pages that a token at the beginning of a page sees."""
        self._most_full_pages = num_full_pages
        self.most = min(self.reach + 1, num_full_pages)
        """Maximum number of pages that a request is promised."""
        if self.num_pages < self.most:
            raise UnalignedLength(f"{self.num_pages} pages can't hold a window of {window} tokens and the next one")
        self._slack, self._promised = slack, 0
        self.page_of: I32 = np.zeros(num_full_pages + 1, dtype=np.int32)
        """Full page → its window page, 0: none."""
        self._uses: I32 = np.zeros(num_full_pages + 1, dtype=np.int32)
        self._free = list(range(self.num_pages, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Full pages with idle window pages, longest idle first."""
        self._changed: dict[int, None] = {}
        self.committed = 0
        """Pages that are promised to holds, or that their spans have beyond that."""
        self.kept = 0
        """Number of spans that a hand-over reads."""

    def pages_for(self, num_full_pages: int) -> int:
        """Return how many window pages the pool has if there are ``num_full_pages`` full pages.

        It is the same share of the maximum, but at least the windows of three requests and the slack. With fewer,
        instances that compute for each other wait for each other too often.
        """
        share = -(-self.most_pages * num_full_pages // self._most_full_pages)
        least = 3 * self.most + self._slack
        return min(max(share, least), self.most_pages)

    def resize(self, num_full_pages: int) -> None:
        """Change the number of window pages to ``pages_for(num_full_pages)``, which must be at least ``committed``.

        Unused pages beyond the new end are dropped. Used ones count as ``beyond`` until no span has them.
        """
        before, self.num_pages = self.num_pages, self.pages_for(num_full_pages)
        idle = [page for page in self._idle if self.page_of[page] > self.num_pages]
        for page in idle:
            self._detach(page)
        attached = set(self.page_of[self.page_of > min(before, self.num_pages)].tolist())
        self.beyond = sum(page > self.num_pages for page in attached)
        # At the bottom, the lowest last: what is new is handed out when all else is.
        more = [page for page in range(self.num_pages, before, -1) if page not in attached]
        self._free = [*more, *(page for page in self._free if page <= self.num_pages)]

    # --- spans ---

    def needs(self, num_tokens: int) -> int:
        """Return the number of window pages that a request of at most ``num_tokens`` tokens is promised."""
        return min(self.most, -(-num_tokens // self.page_size))

    def can_promise(self, num_tokens: int, reserve: int = 0) -> bool:
        """Return whether a request of at most ``num_tokens`` tokens can be promised its window pages.

        ``reserve`` pages stay for other requests, unless the request alone needs the whole pool.
        """
        needs = min(self.needs(num_tokens) + reserve, self.num_pages)
        if self.committed + needs > self.num_pages:
            return False
        return self._promised + needs + self._slack <= self.num_pages or not self._promised

    def promise(self, span: WindowSpan, num_tokens: int) -> None:
        """Promise ``span`` the pages of up to ``num_tokens`` tokens, in place of an earlier promise. Take none yet."""
        before = span.committed
        self._promised -= span.promised
        span.promised = self.needs(num_tokens)
        self._promised += span.promised
        self.committed += span.committed - before

    def writable_len(self, span: WindowSpan, start: int) -> int:
        """Return how many tokens, at least 1, a step can write from position ``start`` on without pages of others."""
        return (self._first_page(start) + self._longest(span)) * self.page_size - start

    def begin(self, span: WindowSpan, row: I32, length: int) -> None:
        """Set the empty ``span`` of a request to the window before position ``length``, the end of its cached prefix.

        Raises ``WindowPagesShort`` if a page in that window has no window page.
        """
        first = self._first_page(length)
        pages = self._pages(row, first, length // self.page_size)
        if not self.page_of[pages].all():
            raise WindowPagesShort(f"a match of pages {pages} whose window pages are gone")
        self._take(pages)
        self._resize(span, first, first + len(pages))

    def move(self, span: WindowSpan, row: I32, start: int, end: int) -> None:
        """Move the window of a request to positions ``[start, end)``, which are written next and have slots.

        Window pages that none of these tokens sees are released, except those kept for a hand-over (``keep``). Pages
        without a window page get one. Raises ``WindowPagesShort`` if they are more than ``room`` allows.
        """
        first, last = self._first_page(start), -(-end // self.page_size)
        if span.kept_from is not None:
            first = min(first, span.kept_from)
        if first > span.begin:
            self._leave(span, self._pages(row, span.begin, min(first, span.end)))
        if first > span.end:
            self._resize(span, first, first)  # no page before it is needed
        if last > span.end:
            self._extend(span, self._pages(row, span.end, last))

    def keep(self, span: WindowSpan, row: I32, first: int) -> bool:
        """Keep the window pages of a row, from page ``first`` on, for a hand-over that reads them, until ``let_go``.

        They stay in the span, or are added again, however far the request moves on. Return False, with nothing changed,
        if one is gone, or if other requests are promised too many pages.
        """
        pages = self._pages(row, first, span.begin)
        gone = not self.page_of[pages].all()
        if gone or span.end - min(first, span.begin) > self._longest(span):
            return False
        self._take(pages)
        self._resize(span, min(first, span.begin), span.end)
        self.kept += span.kept_from is None
        span.kept_from = first
        return True

    def let_go(self, span: WindowSpan) -> None:
        """Release what ``keep`` kept: the pages may leave the span when it moves. Do nothing if none were kept."""
        self.kept -= span.kept_from is not None
        span.kept_from = None

    def growable(self, spans: Sequence[WindowSpan], lengths: Sequence[int]) -> list[bool]:
        """Return, for each of these requests with ``lengths`` tokens, whether it can get another token.

        A span that a hand-over reads outgrows its promise. It waits while these pages are promised to others.
        """
        spare = self.num_pages - self.committed
        able = []
        for span, length in zip(spans, lengths, strict=True):
            more = span.kept_from is not None and span.end * self.page_size <= length
            more = more and span.end - span.begin >= span.promised
            able.append(not more or spare > 0)
            spare -= more and spare > 0
        return able

    def outgrown(self, holds: Sequence[H]) -> list[H]:
        """Return the holds, with slots for their next token, that must ``move`` their window before the next step."""
        size = self.page_size
        return [hold for hold in holds if hold.window.must_move(hold.kv_len, size)]

    def end(self, span: WindowSpan, row: I32) -> None:
        """Release all window pages of a span and its promise, because its request's memory is freed."""
        self._leave(span, self._pages(row, span.begin, span.end))
        self.let_go(span)
        self.committed -= span.committed
        self._promised -= span.promised
        span.promised = 0

    # --- the prefix cache ---

    def usable(self, found: Sequence[I32]) -> int:
        """Return the length, in tokens, of the longest part of a cached prefix with all pages of its last window.

        ``found``: the prefix's slots, in parts of whole pages.
        """
        if not found:
            return 0
        slots = found[0] if len(found) == 1 else np.concatenate(found)
        missing = self.page_of[slots[:: self.page_size] // self.page_size] == 0
        return _usable(missing, self.reach) * self.page_size

    def replace(self, span: WindowSpan, start: int, our_slots: I32, cached_slots: I32) -> None:
        """Replace own slots, from position ``start`` on, by cached ones of the same tokens, in whole pages.

        Only accounts change here. A cached page that lost its window page gets that of the request's own page.
        """
        ours, theirs = slots_to_pages(our_slots, self.page_size), slots_to_pages(cached_slots, self.page_size)
        first = start // self.page_size
        for i, (own, cached) in enumerate(zip(ours.tolist(), theirs.tolist(), strict=True), first):
            if self.page_of[own] and not self.page_of[cached]:
                idle = not self._uses[own]
                window_page = self._detach(own, keep=True)
                self._attach(cached, window_page)
                if idle:
                    self._rest(cached)
            if span.begin <= i < span.end:
                if not self._uses[cached]:
                    self._idle.pop(cached, None)
                self._uses[cached] += 1
                self._uses[own] -= 1

    def forget(self, pages: I32) -> None:
        """Free the window pages of the full ``pages``, which are free now. Raises ``InvalidFree`` if a span has one."""
        used = self._uses[pages] != 0
        if used.any():
            raise InvalidFree(f"page {pages[used.argmax()]} is freed in the window of a request")
        for page in pages[self.page_of[pages] != 0].tolist():
            self._detach(page)

    # --- the worker ---

    def behind(self, pages: I32) -> list[I32]:
        """Return the window pages of full ones, 0 for none: an array for each group of windowed layers, here one."""
        return [self.page_of[pages]]

    def take_changes(self) -> I32:
        """Return [N, 2]: full pages with a changed window page since the last call, and the new one (0: none)."""
        pages = np.fromiter(self._changed, dtype=np.int32, count=len(self._changed))
        self._changed.clear()
        return np.stack((pages, self.page_of[pages]), axis=1)

    # --- figures ---

    def usage(self) -> dict[str, int]:
        """Return how the window pool is used, in tokens: all, free, cached (in no request's window) and in use."""
        size = self.page_size
        total, free, idle = self.num_pages * size, len(self._free) * size, len(self._idle) * size
        used = total - free - idle + self.beyond * size
        return {"window_total": total, "window_free": free, "window_cached": idle, "window_in_use": used}

    def accounts(self) -> WindowAccounts:
        """Return the lists and counts of window pages, for ``check_invariants``. They are not to be changed."""
        sizes = (self.num_pages, self.most_pages, self.beyond, self.committed)
        return WindowAccounts(*sizes, self.page_of, list(self._free), list(self._idle), self._uses.copy())

    def _pages(self, row: I32, begin: int, end: int) -> I32:
        return slots_to_pages(row[begin * self.page_size : end * self.page_size : self.page_size], self.page_size)

    def _first_page(self, position: int) -> int:
        """Return the number of the first page that tokens in the page of ``position`` see, counted in the row."""
        return max(0, position // self.page_size - self.reach)

    def _longest(self, span: WindowSpan) -> int:
        """Return the maximum number of pages ``span`` may have in all: the pool's, less those committed to others."""
        return self.num_pages - (self.committed - span.committed)

    def _leave(self, span: WindowSpan, pages: I32) -> None:
        """Remove the full ``pages``, its first ones, from ``span``. Window pages in no span any more become idle."""
        self._uses[pages] -= 1
        for page in pages[self._uses[pages] == 0].tolist():
            self._rest(page)
        self._resize(span, span.begin + len(pages), span.end)

    def _extend(self, span: WindowSpan, pages: I32) -> None:
        """Give window pages to ``pages``, which follow a span and have none, and add them to the span.

        If none is free, the longest idle lose theirs. Raises ``WindowPagesShort`` if the span gets too long.
        """
        if span.end - span.begin + len(pages) > self._longest(span):
            raise WindowPagesShort(f"{len(pages)} more pages for {span}, of {self.num_pages}")
        for page in pages.tolist():
            if not self._free:
                self._detach(next(iter(self._idle)))
            self._attach(page, self._free.pop())
        self._uses[pages] = 1
        self._resize(span, span.begin, span.end + len(pages))

    def _take(self, pages: I32) -> None:
        for page in pages[self._uses[pages] == 0].tolist():
            del self._idle[page]
        self._uses[pages] += 1

    def _resize(self, span: WindowSpan, begin: int, end: int) -> None:
        before = span.committed
        span.begin, span.end = begin, end
        self.committed += span.committed - before

    def _rest(self, page: int) -> None:
        """Make the window page of the full ``page`` idle, as no span has it. Beyond the pool's end, detach it."""
        if self.page_of[page] > self.num_pages:
            self._detach(page)
        else:
            self._idle[page] = None

    def _attach(self, page: int, window_page: int) -> None:
        self.page_of[page] = window_page
        self.beyond += window_page > self.num_pages
        self._changed[page] = None

    def _detach(self, page: int, *, keep: bool = False) -> int:
        """Detach the window page of the full ``page``, and return its number. It is free now unless ``keep``."""
        window_page = int(self.page_of[page])
        self.page_of[page] = 0
        self._changed[page] = None
        self._idle.pop(page, None)
        self.beyond -= window_page > self.num_pages
        if not keep and window_page <= self.num_pages:
            self._free.append(window_page)
        return window_page


def _usable(missing: npt.NDArray[np.bool_], reach: int) -> int:
    """Return how many first pages form the longest prefix with a complete last window.

    That window is the prefix's last ``reach`` pages, or all of them if they are fewer. ``missing`` [N]: whether a page
    has lost its window page.
    """
    count = len(missing)
    if not missing[max(0, count - reach) :].any():
        return count
    ordinals = np.arange(1, count + 1)
    run = ordinals - np.maximum.accumulate(np.where(missing, ordinals, 0))
    usable = np.flatnonzero(run >= np.minimum(ordinals, reach))
    return int(usable[-1]) + 1 if usable.size else 0


class NoWindows:
    """The ``WindowPages`` of a model without windows: there are none, none are needed, and nothing is short of them."""

    groups = 1
    num_pages = most = reach = beyond = committed = kept = 0

    def pages_for(self, num_full_pages: int) -> int:
        """Return 0: a model without windows has no window pages."""
        return 0

    def resize(self, num_full_pages: int) -> None:
        """Do nothing: there is no window pool to resize."""

    def needs(self, num_tokens: int) -> int:
        """Return 0: no request needs window pages."""
        return 0

    def can_promise(self, num_tokens: int, reserve: int = 0) -> bool:
        """Return True: no request needs window pages."""
        return True

    def promise(self, span: WindowSpan, num_tokens: int) -> None:
        """Do nothing: no request needs window pages."""

    def writable_len(self, span: WindowSpan, start: int) -> int:
        """Return more tokens than any prompt has: window pages limit no step."""
        return sys.maxsize

    def begin(self, span: WindowSpan, row: I32, length: int) -> None:
        """Do nothing: a request has no window to begin."""

    def move(self, span: WindowSpan, row: I32, start: int, end: int) -> None:
        """Do nothing: a request has no window to move."""

    def keep(self, span: WindowSpan, row: I32, first: int) -> bool:
        """Return True: a hand-over's pages are all pinned with its hold."""
        return True

    def let_go(self, span: WindowSpan) -> None:
        """Do nothing: no window pages were kept."""

    def growable(self, spans: Sequence[WindowSpan], lengths: Sequence[int]) -> list[bool]:
        """Return True for each of the requests with these ``spans``: none waits for window pages.

        ``lengths``: tokens of each request, which do not matter here.
        """
        return [True] * len(spans)

    def outgrown(self, holds: Sequence[H]) -> Sequence[H]:
        """Return (): no hold has a window that must move."""
        return ()

    def end(self, span: WindowSpan, row: I32) -> None:
        """Do nothing: the span has no pages to release."""

    def usable(self, found: Sequence[I32]) -> int:
        """Return the number of slots found: without windows, every cached prefix is usable as a whole."""
        return sum(slots.size for slots in found)

    def replace(self, span: WindowSpan, start: int, our_slots: I32, cached_slots: I32) -> None:
        """Do nothing: the replaced pages have no window pages."""

    def forget(self, pages: I32) -> None:
        """Do nothing: the freed pages have no window pages."""

    def take_changes(self) -> I32:
        """Return no changes, [0, 2]: there are no window pages."""
        return NO_CHANGES

    def behind(self, pages: I32) -> list[I32]:
        """Return []: there is no group of windowed layers."""
        return []

    def usage(self) -> dict[str, int]:
        """Return {}: there is no window pool to report."""
        return {}

    def accounts(self) -> None:
        """Return None: there is nothing to check."""


Windows = WindowPages | NoWindows
NO_CHANGES: I32 = np.empty((0, 2), dtype=np.int32)
