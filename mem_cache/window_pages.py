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

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..messages.base import I32
from .errors import InvalidFree, UnalignedLength, WindowPagesShort


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
        """Number of pages that other holds cannot get."""
        return max(self.promised, self.end - self.begin)


class WindowPages:
    """Owner of ``num_slots // page_size`` window pages, numbered from 1, for full pages ``1 … num_full_pages``.

    In the layer that sees most, a token sees itself and the ``window - 1`` tokens before it. Arrays named ``pages``
    ([N] int32) are full pages, none twice.
    """

    def __init__(self, window: int, num_slots: int, num_full_pages: int, page_size: int, slack: int = 0) -> None:
        """Set up the pool. ``slack`` pages (a piece of a prompt) are never promised, unless there is only one hold."""
        if window < 1 or num_slots % page_size:
            raise UnalignedLength(f"a window of {window} over {num_slots} slots in pages of {page_size}")
        self.window = window
        self.page_size = page_size
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
        self._slack = slack
        self.page_of: I32 = np.zeros(num_full_pages + 1, dtype=np.int32)
        """Full page → its window page, 0: none."""
        self._uses: I32 = np.zeros(num_full_pages + 1, dtype=np.int32)
        self._free = list(range(self.num_pages, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Full pages with idle window pages, longest idle first."""
        self._changed: dict[int, None] = {}
        self._committed = 0
        self._promised = 0
        self.kept = 0
        """Number of spans that a hand-over reads."""

    def pages_for(self, num_full_pages: int) -> int:
        """Return the size of the pool for this number of full pages.

        It is the same share of the maximum, but at least the windows of three requests and the slack. With fewer,
        instances that compute for each other wait for each other too often.
        """
        share = -(-self.most_pages * num_full_pages // self._most_full_pages)
        least = 3 * self.most + self._slack
        return min(max(share, least), self.most_pages)

    def can_resize(self, num_full_pages: int) -> bool:
        """Return whether all promised and used pages would fit."""
        return self._committed <= self.pages_for(num_full_pages)

    def resize(self, num_full_pages: int) -> None:
        """Change the size to ``pages_for`` this number of full pages, which ``can_resize`` must allow.

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

    def first_page(self, position: int) -> int:
        """Return the first page of a row that tokens in the page of ``position`` see."""
        return max(0, position // self.page_size - self.reach)

    def needs(self, num_tokens: int) -> int:
        """Return the number of pages that a request of at most ``num_tokens`` is promised."""
        return min(self.most, -(-num_tokens // self.page_size))

    def can_promise(self, num_tokens: int, reserve: int = 0) -> bool:
        """Return whether a request of at most ``num_tokens`` can be promised its pages.

        ``reserve`` pages stay for other requests, unless the request alone needs the whole pool.
        """
        needs = min(self.needs(num_tokens) + reserve, self.num_pages)
        if self._committed + needs > self.num_pages:
            return False
        return self._promised + needs + self._slack <= self.num_pages or not self._promised

    def promise(self, span: WindowSpan, num_tokens: int) -> None:
        """Keep for ``span`` what a request of at most ``num_tokens`` needs."""
        before = span.committed
        self._promised -= span.promised
        span.promised = self.needs(num_tokens)
        self._promised += span.promised
        self._committed += span.committed - before

    def longest(self, span: WindowSpan) -> int:
        """Return the maximum number of pages that ``span`` may have now."""
        return self.num_pages - (self._committed - span.committed)

    def begin(self, span: WindowSpan, first: int, pages: I32) -> None:
        """Turn an empty span into the run from ``first`` on over ``pages``, which all have window pages."""
        if not self.page_of[pages].all():
            raise WindowPagesShort(f"a match of pages {pages} whose window pages are gone")
        self._take(pages)
        self._resize(span, first, first + len(pages))

    def leave(self, span: WindowSpan, pages: I32) -> None:
        """Remove the first pages of a span, ``pages``, from it."""
        self._uses[pages] -= 1
        for page in pages[self._uses[pages] == 0].tolist():
            self._rest(page)
        self._resize(span, span.begin + len(pages), span.end)

    def skip(self, span: WindowSpan, first: int) -> None:
        """Let an empty span begin at ``first``: no page before it is needed."""
        self._resize(span, first, first)

    def keep(self, span: WindowSpan, first: int, pages: I32) -> bool:
        """Keep the pages of a span from page ``first`` on for a hand-over that reads them.

        ``pages``, from there to the span's beginning, are added to it again. Returns False if one of them is gone, or
        if this number is promised to others.
        """
        gone = not self.page_of[pages].all()
        if gone or span.end - min(first, span.begin) > self.longest(span):
            return False
        self._take(pages)
        self._resize(span, min(first, span.begin), span.end)
        self.kept += span.kept_from is None
        span.kept_from = first
        return True

    def let_go(self, span: WindowSpan) -> None:
        """End the use of a span by a hand-over; harmless if there was none."""
        self.kept -= span.kept_from is not None
        span.kept_from = None

    def growable(self, spans: Sequence[WindowSpan], lengths: Sequence[int]) -> list[bool]:
        """Return which of these requests, with ``lengths`` tokens each, can have another token.

        A kept span takes more pages than promised as it moves on. It waits if the others are promised these pages.
        """
        spare = self.num_pages - self._committed
        able = []
        for span, length in zip(spans, lengths, strict=True):
            more = span.kept_from is not None and span.end * self.page_size <= length
            more = more and span.end - span.begin >= span.promised
            able.append(not more or spare > 0)
            spare -= more and spare > 0
        return able

    def extend(self, span: WindowSpan, pages: I32) -> None:
        """Give ``pages``, which follow a span and have none, window pages, and make them part of it.

        Raises ``WindowPagesShort`` where that is more than ``longest`` allows.
        """
        if span.end - span.begin + len(pages) > self.longest(span):
            raise WindowPagesShort(f"{len(pages)} more pages for {span}, of {self.num_pages}")
        for page in pages.tolist():
            if not self._free:
                self._detach(next(iter(self._idle)))
            self._attach(page, self._free.pop())
        self._uses[pages] = 1
        self._resize(span, span.begin, span.end + len(pages))

    def end(self, span: WindowSpan) -> None:
        """End an empty span and its promise."""
        self.let_go(span)
        self._committed -= span.committed
        self._promised -= span.promised
        span.promised = 0

    # --- the prefix cache ---

    def usable(self, pages: I32) -> int:
        """Return the length, in pages, of the longest part of a cached prefix that a request can go on from.

        All pages of the window before its end must be there.
        """
        count = len(pages)
        missing = self.page_of[pages] == 0
        if not missing[max(0, count - self.reach) :].any():
            return count
        ordinals = np.arange(1, count + 1)
        run = ordinals - np.maximum.accumulate(np.where(missing, ordinals, 0))
        usable = np.flatnonzero(run >= np.minimum(ordinals, self.reach))
        return int(usable[-1]) + 1 if usable.size else 0

    def replace(self, span: WindowSpan, first: int, ours: I32, theirs: I32) -> None:
        """Replace ``ours`` in a row, from page ``first`` on, by ``theirs``, which are cached pages of the same tokens.

        If one of theirs has lost its window page, it gets that of ours.
        """
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

    def take_changes(self) -> I32:
        """Return [N, 2]: full pages with a changed window page since the last call, and the new one (0: none)."""
        pages = np.fromiter(self._changed, dtype=np.int32, count=len(self._changed))
        self._changed.clear()
        return np.stack((pages, self.page_of[pages]), axis=1)

    # --- figures ---

    def available_size(self) -> int:
        """Return the number of tokens in free pages."""
        return len(self._free) * self.page_size

    def idle_size(self) -> int:
        """Return the number of tokens in idle pages."""
        return len(self._idle) * self.page_size

    def usage(self) -> dict[str, int]:
        """Return the numbers of tokens: all, free, idle and in use."""
        total, free, idle = self.num_pages * self.page_size, self.available_size(), self.idle_size()
        used = total - free - idle + self.beyond * self.page_size
        return {"window_total": total, "window_free": free, "window_cached": idle, "window_in_use": used}

    def free_pages(self) -> list[int]:
        """Return a copy of the free window pages, in no particular order."""
        return list(self._free)

    def idle_pages(self) -> list[int]:
        """Return a copy of the full pages with idle window pages."""
        return list(self._idle)

    def uses(self) -> I32:
        """Return a copy of the number of spans that have each full page."""
        return self._uses.copy()

    @property
    def committed(self) -> int:
        """Pages that are promised to holds, or that their spans have beyond that."""
        return self._committed

    def _take(self, pages: I32) -> None:
        for page in pages[self._uses[pages] == 0].tolist():
            del self._idle[page]
        self._uses[pages] += 1

    def _resize(self, span: WindowSpan, begin: int, end: int) -> None:
        before = span.committed
        span.begin, span.end = begin, end
        self._committed += span.committed - before

    def _rest(self, page: int) -> None:
        """Make the window page of a full page idle, or drop it beyond the pool's end: no span has it any more."""
        if self.page_of[page] > self.num_pages:
            self._detach(page)
        else:
            self._idle[page] = None

    def _attach(self, page: int, window_page: int) -> None:
        self.page_of[page] = window_page
        self.beyond += window_page > self.num_pages
        self._changed[page] = None

    def _detach(self, page: int, *, keep: bool = False) -> int:
        """Take a full page its window page, which becomes free unless the caller keeps it."""
        window_page = int(self.page_of[page])
        self.page_of[page] = 0
        self._changed[page] = None
        self._idle.pop(page, None)
        self.beyond -= window_page > self.num_pages
        if not keep and window_page <= self.num_pages:
            self._free.append(window_page)
        return window_page
