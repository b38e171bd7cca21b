"""Pages of the layers with a sliding window: which full page has one, and when it goes back.

Rows, slots and the prefix tree name *full* pages, of the layers that see every token. What windowed layers keep of the
same tokens lies in *window pages*, of a pool of their own; ``page_of`` leads from one to the other. A full page gets
its window page when a step is planned that writes it, not when it is handed out: a long prompt has all of its full
pages from the beginning, and needs no more window pages at a time than a piece of it and the window before that.

Each window page is in one state:

========  =======================  ==============================  ==================================================
state     attached to              used by                         goes back
========  =======================  ==============================  ==================================================
free      nothing                  nobody                          is back
used      one full page in use     each hold whose span covers it  never, as long as there is one
idle      one full page in use     nobody; a match may need it     with its full page; or when pages are short, the one
                                                                   first that has been idle longest
========  =======================  ==============================  ==================================================

A hold's *span* is the run of its row's pages that reaches from the window of the next token it computes to the last
token it has planned. It moves on when the next step of it is planned: what leaves it may be overwritten in that step,
which no token of it sees any more. A full page whose prefix is cached may be in the spans of several holds.

Nobody runs short in the middle: each hold is *promised* what the next token needs, wherever it stands, and longer spans
are given out of what is not promised, which for the sake of them is never all. The sum of max(promised, span) never
exceeds the pool.

The pool may become smaller (``resize``): what lies beyond its end then goes as soon as no span has it. As no more is
promised than is left, there is a page within the end for whoever takes one meanwhile.
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
    """Of a hold: pages ``[begin, end)`` of its row are used in the window pool, ``promised`` pages are kept for it.

    ``kept_from``: none from there on leaves it, as a hand-over reads them; None: there is no such hand-over.
    """

    begin: int = 0
    end: int = 0
    promised: int = 0
    kept_from: int | None = None

    @property
    def committed(self) -> int:
        """Pages that nobody else can count on."""
        return max(self.promised, self.end - self.begin)


class WindowPages:
    """Owner of ``num_slots // page_size`` window pages, numbered from 1, for full pages ``1 … num_full_pages``.

    ``window``: a token sees itself and the ``window - 1`` before it, in the layer that sees most. Arrays named
    ``pages`` ([N] int32) are full pages, none twice.
    """

    def __init__(self, window: int, num_slots: int, num_full_pages: int, page_size: int, slack: int = 0) -> None:
        """``slack``: so many pages (a piece of a prompt) are promised to nobody, unless nobody else is there."""
        if window < 1 or num_slots % page_size:
            raise UnalignedLength(f"a window of {window} over {num_slots} slots in pages of {page_size}")
        self.window = window
        self.page_size = page_size
        self.num_pages = num_slots // page_size
        self.most_pages = self.num_pages
        """What ``resize`` can make it again."""
        self.beyond = 0
        """Pages behind the pool's end that a span has, since it became smaller."""
        self.reach = -(-(window - 1) // page_size)
        """Pages that a token at the beginning of one sees before it."""
        self._most_full_pages = num_full_pages
        self.most = min(self.reach + 1, num_full_pages)
        """Pages that any request is promised."""
        if self.num_pages < self.most:
            raise UnalignedLength(f"{self.num_pages} pages can't hold a window of {window} tokens and the next one")
        self._slack = slack
        self.page_of: I32 = np.zeros(num_full_pages + 1, dtype=np.int32)
        """Full page → its window page, 0: none."""
        self._uses: I32 = np.zeros(num_full_pages + 1, dtype=np.int32)
        self._free = list(range(self.num_pages, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Full pages, those first whose window pages have been idle longest."""
        self._changed: dict[int, None] = {}
        self._committed = 0
        self._promised = 0
        self.kept = 0
        """Spans that a hand-over reads."""

    def pages_for(self, num_full_pages: int) -> int:
        """How large the pool is beside so many full pages: of the same share, but for the windows of three requests and
        what may be computed at a time. With fewer, instances that compute for each other wait for each other too often.
        """
        share = -(-self.most_pages * num_full_pages // self._most_full_pages)
        least = 3 * self.most + self._slack
        return min(max(share, least), self.most_pages)

    def can_resize(self, num_full_pages: int) -> bool:
        """Whether all that is promised, or used, would find room."""
        return self._committed <= self.pages_for(num_full_pages)

    def resize(self, num_full_pages: int) -> None:
        """Have ``pages_for`` so many full pages from now on; not below what ``can_resize`` allows. What nobody uses
        beyond that is gone; what is used counts as ``beyond`` until no span has it.
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
        """The first page of a row that tokens in the page of ``position`` see."""
        return max(0, position // self.page_size - self.reach)

    def needs(self, num_tokens: int) -> int:
        """Pages that a request is promised which never has more than ``num_tokens``."""
        return min(self.most, -(-num_tokens // self.page_size))

    def can_promise(self, num_tokens: int, reserve: int = 0) -> bool:
        """Whether such a request can be promised its pages; ``reserve``: so many stay for others, where there are more
        than it needs alone.
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
        """Pages that ``span`` may have at most now."""
        return self.num_pages - (self._committed - span.committed)

    def begin(self, span: WindowSpan, first: int, pages: I32) -> None:
        """An empty span becomes the run from ``first`` on over ``pages``, which all have window pages."""
        if not self.page_of[pages].all():
            raise WindowPagesShort(f"a match of pages {pages} whose window pages are gone")
        self._take(pages)
        self._resize(span, first, first + len(pages))

    def leave(self, span: WindowSpan, pages: I32) -> None:
        """The first pages of a span, ``pages``, leave it."""
        self._uses[pages] -= 1
        for page in pages[self._uses[pages] == 0].tolist():
            self._rest(page)
        self._resize(span, span.begin + len(pages), span.end)

    def skip(self, span: WindowSpan, first: int) -> None:
        """An empty span begins at ``first``: nothing before it is needed."""
        self._resize(span, first, first)

    def keep(self, span: WindowSpan, first: int, pages: I32) -> bool:
        """A hand-over reads what a span has from page ``first`` on; ``pages``, those from there to its beginning, come
        back to it. False where one of them is gone, or where others count on as many.
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
        """No hand-over reads it any more; harmless where none did."""
        self.kept -= span.kept_from is not None
        span.kept_from = None

    def growable(self, spans: Sequence[WindowSpan], lengths: Sequence[int]) -> list[bool]:
        """Which of these requests, of so many tokens each, can have another: one whose span is kept takes more than it
        was promised as it moves on, and waits where others count on that.
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
        """An empty span is over, and what it was promised is free."""
        self.let_go(span)
        self._committed -= span.committed
        self._promised -= span.promised
        span.promised = 0

    # --- the prefix cache ---

    def usable(self, pages: I32) -> int:
        """Of the cached prefix in ``pages``, so many first pages can be begun from: the window before is all there."""
        count = len(pages)
        missing = self.page_of[pages] == 0
        if not missing[max(0, count - self.reach) :].any():
            return count
        ordinals = np.arange(1, count + 1)
        run = ordinals - np.maximum.accumulate(np.where(missing, ordinals, 0))
        usable = np.flatnonzero(run >= np.minimum(ordinals, self.reach))
        return int(usable[-1]) + 1 if usable.size else 0

    def replace(self, span: WindowSpan, first: int, ours: I32, theirs: I32) -> None:
        """``theirs``, which are cached, take the place of ``ours``, of the same tokens, in a row, from page ``first``.

        Where one of theirs has lost its window page, it gets that of ours.
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
        """The full ``pages`` are free: so are their window pages. Raises ``InvalidFree`` where a span has one."""
        used = self._uses[pages] != 0
        if used.any():
            raise InvalidFree(f"page {pages[used.argmax()]} is freed in the window of a request")
        for page in pages[self.page_of[pages] != 0].tolist():
            self._detach(page)

    # --- the worker ---

    def take_changes(self) -> I32:
        """[N, 2]: full pages whose window page changed since the last call, and what it is now (0: none)."""
        pages = np.fromiter(self._changed, dtype=np.int32, count=len(self._changed))
        self._changed.clear()
        return np.stack((pages, self.page_of[pages]), axis=1)

    # --- what is where ---

    def available_size(self) -> int:
        """Free pages, in tokens."""
        return len(self._free) * self.page_size

    def idle_size(self) -> int:
        """Idle pages, in tokens."""
        return len(self._idle) * self.page_size

    def usage(self) -> dict[str, int]:
        """Tokens: all, free, idle, in use."""
        total, free, idle = self.num_pages * self.page_size, self.available_size(), self.idle_size()
        used = total - free - idle + self.beyond * self.page_size
        return {"window_total": total, "window_free": free, "window_cached": idle, "window_in_use": used}

    def free_pages(self) -> list[int]:
        """The free window pages, in no particular order (a copy)."""
        return list(self._free)

    def idle_pages(self) -> list[int]:
        """The full pages whose window pages are idle (a copy)."""
        return list(self._idle)

    def uses(self) -> I32:
        """Full page → spans that have it (a copy)."""
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
        """A full page's window page is in no span any more."""
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
