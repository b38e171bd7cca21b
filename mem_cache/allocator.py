"""The allocator of the KV pool's slots.

Life of a page: free → (``alloc_extend`` | ``alloc_decode``) in use → ``free`` → free. Page 0 is neither: padded tokens
write there. A page has one owner (a request or the prefix cache); the allocator does not know which one.

A pool may become smaller while pages beyond its new end are in use. They count as pages of the smaller pool until they
are freed, and then no longer exist. So ``available_size`` is right at once, and new pages lie within the new end. It is
negative if more is in use than the pool now has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from ..messages.base import I32
from .errors import DoubleFree, InvalidFree, InvariantViolation, MisplacedSlot, UnalignedLength
from .pages import slots_to_pages
from .window_pages import NoWindows, Windows


class TokenToKVPoolAllocator(ABC):
    """Slots ``page_size … page_size + size - 1``; a position gets a slot with the same offset in its page.

    ``windows``: what windowed layers keep of the same pages, which lies elsewhere.
    """

    def __init__(self, num_slots: int, page_size: int, windows: Windows | None = None) -> None:
        if page_size < 1 or num_slots < 1 or num_slots % page_size:
            raise UnalignedLength(f"a pool of {num_slots} slots is not a whole number (≥ 1) of pages of {page_size}")
        self.size = num_slots
        self.page_size = page_size
        self.num_pages = num_slots // page_size
        self.most_pages = self.num_pages
        """What ``resize`` can make it again."""
        self.beyond = 0
        """Pages in use behind the pool's end, since it became smaller."""
        self.windows: Windows = windows or NoWindows()

    @abstractmethod
    def available_size(self) -> int:
        """Return the number of slots in free pages, minus the slots in use beyond the pool's end.

        Free slots at the end of a request's last page do not count, because only that request can use them.
        """

    @abstractmethod
    def alloc_extend(self, prefix_len: int, seq_len: int, last_slot: int) -> I32 | None:
        """Allocate slots for positions ``[prefix_len, seq_len)`` of one request: [seq_len - prefix_len] int32.

        The first ones are the rest of the page of ``last_slot``, the slot of position ``prefix_len - 1``. It is ignored
        if ``prefix_len`` is page-aligned. Then come new pages; the last one may be used in part.
        None if too few pages are free; nothing is changed then. Raises ``MisplacedSlot``.
        """

    @abstractmethod
    def alloc_decode(self, seq_lens: I32, last_slots: I32) -> I32 | None:
        """Allocate one slot for each of B requests: [B] int32, aligned with the arguments.

        ``seq_lens`` [B] counts the new token. ``last_slots`` [B] is the slot of the token before it, which is ignored
        if the new token begins a page. None if too few pages are free; nothing is changed then. Raises
        ``MisplacedSlot``.
        """

    @abstractmethod
    def free(self, slots: I32) -> None:
        """Take back every page that ``slots`` [N] touches: some slots of a page stand for all of it.

        The slots of one page must stand together. The pages may be handed out again by the next call; their window
        pages are free, too. Raises ``DoubleFree`` and ``InvalidFree`` (page 0, outside the pool, or in a window that a
        request sees); nothing is changed then.
        """

    @abstractmethod
    def resize(self, num_pages: int) -> None:
        """Limit allocation to the first ``num_pages`` pages from now on, 1 to ``most_pages``.

        Pages beyond them that are in use stay so until they are freed. Raises ``ValueError``.
        """

    @abstractmethod
    def free_pages(self) -> I32:
        """Return a copy of the free pages, in no particular order."""

    @abstractmethod
    def check_invariants(self) -> None:
        """Raise ``InvariantViolation`` when the free list and the pages' states disagree."""


class PagedTokenToKVPoolAllocator(TokenToKVPoolAllocator):
    """Allocator with the free pages on a stack: the page freed last is handed out first.

    A stack is better than a queue. The pool's memory is committed when it is first touched, so reuse keeps the
    footprint at the peak of the real need. A page that was just freed is also still in the processor's cache.
    """

    def __init__(self, num_slots: int, page_size: int, windows: Windows | None = None) -> None:
        super().__init__(num_slots, page_size, windows)
        self._stack: I32 = np.arange(self.num_pages, 0, -1, dtype=np.int32)
        self._top = self.num_pages
        self._in_use = np.zeros(self.num_pages + 1, dtype=np.bool_)
        self._offsets: I32 = np.arange(page_size, dtype=np.int32)
        # Scratch of ``free``: where in its argument a page was named last.
        self._named_at = np.zeros(self.num_pages + 1, dtype=np.int64)

    def available_size(self) -> int:
        return (self._top - self.beyond) * self.page_size

    def alloc_extend(self, prefix_len: int, seq_len: int, last_slot: int) -> I32 | None:
        if not 0 <= prefix_len <= seq_len:
            raise ValueError(f"can't extend from {prefix_len} to {seq_len} tokens")
        tail = min(-prefix_len % self.page_size, seq_len - prefix_len)
        rest = seq_len - prefix_len - tail
        num_new = -(-rest // self.page_size)
        if num_new > max(0, self._top - self.beyond):
            return None
        slots = np.empty(tail + rest, dtype=np.int32)
        if tail:
            if (last_slot + 1 - prefix_len) % self.page_size or not self._is_in_use(last_slot):
                raise MisplacedSlot(f"slot {last_slot} can't hold position {prefix_len - 1}")
            slots[:tail] = np.arange(last_slot + 1, last_slot + 1 + tail, dtype=np.int32)
        if num_new:
            first_slots = self._pop(num_new) * self.page_size
            slots[tail:] = (first_slots[:, None] + self._offsets).ravel()[:rest]
        return slots

    def alloc_decode(self, seq_lens: I32, last_slots: I32) -> I32 | None:
        slots = np.add(last_slots, 1, dtype=np.int32)
        begins_page = (seq_lens - 1) % self.page_size == 0
        num_new = int(np.count_nonzero(begins_page))
        if num_new > max(0, self._top - self.beyond):
            return None
        misplaced = (slots - seq_lens + 1) % self.page_size != 0
        misplaced &= ~begins_page
        if misplaced.any():
            i = int(misplaced.argmax())
            raise MisplacedSlot(f"slot {last_slots[i]} can't hold position {seq_lens[i] - 2}")
        if num_new:
            slots[begins_page] = self._pop(num_new) * self.page_size
        return slots

    def free(self, slots: I32) -> None:
        if not slots.size:
            return
        pages = slots_to_pages(slots, self.page_size)
        if pages.min() < 1 or pages.max() > self.most_pages:
            raise InvalidFree(f"pages {pages.min()} … {pages.max()} reach outside the pool's 1 … {self.most_pages}")
        order = np.arange(pages.size)
        self._named_at[pages] = order
        twice = self._named_at[pages] != order
        if twice.any():
            raise DoubleFree(f"page {pages[twice.argmax()]} is named twice in one call")
        in_use = self._in_use[pages]
        if not in_use.all():
            raise DoubleFree(f"page {pages[in_use.argmin()]} is free already")
        self.windows.forget(pages)
        self._in_use[pages] = False
        if self.beyond:
            within = pages <= self.num_pages
            self.beyond -= pages.size - int(np.count_nonzero(within))
            pages = pages[within]
        # Reversed, so that a request's pages come back in ascending order where they went out so: fewer, longer spans.
        self._stack[self._top : self._top + pages.size] = pages[::-1]
        self._top += pages.size

    def resize(self, num_pages: int) -> None:
        if not 1 <= num_pages <= self.most_pages:
            raise ValueError(f"a pool of {self.most_pages} pages can't be one of {num_pages}")
        kept = self._stack[: self._top]
        kept = kept[kept <= num_pages]
        # At the bottom, the lowest last: what is new is handed out when all else is.
        more = np.arange(num_pages, self.num_pages, -1, dtype=np.int32)
        free = np.concatenate((more[~self._in_use[more]], kept))
        self._stack[: free.size], self._top = free, free.size
        self.num_pages, self.size = num_pages, num_pages * self.page_size
        self.beyond = int(np.count_nonzero(self._in_use[num_pages + 1 :]))

    def free_pages(self) -> I32:
        return self._stack[: self._top].copy()

    def check_invariants(self) -> None:
        named = np.bincount(self._stack[: self._top], minlength=self.most_pages + 1)
        expected = ~self._in_use
        expected[0] = False
        expected[self.num_pages + 1 :] = False
        wrong = named != expected
        if wrong.any():
            page = int(wrong.argmax())
            state = "in use" if self._in_use[page] else "not in use"
            raise InvariantViolation(f"page {page} stands {named[page]} times in the free list and is marked {state}")
        if (beyond := int(np.count_nonzero(self._in_use[self.num_pages + 1 :]))) != self.beyond:
            raise InvariantViolation(f"{beyond} pages beyond the pool's end are in use, accounts say {self.beyond}")

    def _is_in_use(self, slot: int) -> bool:
        page = slot // self.page_size
        return 1 <= page <= self.most_pages and bool(self._in_use[page])

    def _pop(self, num_pages: int) -> I32:
        """Take ``num_pages`` pages off the stack of free pages, which must have them, and mark them as in use."""
        self._top -= num_pages
        pages = self._stack[self._top : self._top + num_pages][::-1]
        self._in_use[pages] = True
        return pages
