"""Arithmetic between tokens, slots and pages. Slot ``s`` lies in page ``s // page_size``."""

from __future__ import annotations

import numpy as np

from ..messages.base import I32


def floor_to_page(num_tokens: int, page_size: int) -> int:
    """Return ``num_tokens`` rounded down to whole pages, in tokens."""
    return num_tokens - num_tokens % page_size


def ceil_to_page(num_tokens: int, page_size: int) -> int:
    """Return ``num_tokens`` rounded up to whole pages, in tokens."""
    return num_tokens + -num_tokens % page_size


def slots_to_pages(slots: I32, page_size: int) -> I32:
    """Return the numbers of the pages that ``slots`` [N] lie in, in their order: [P] int32.

    Neighbouring slots of one page count once. A page with slots that are not neighbours occurs several times.
    """
    pages = slots // page_size
    if page_size == 1 or pages.size < 2:
        return pages
    first = np.empty(pages.size, dtype=np.bool_)
    first[0] = True
    np.not_equal(pages[1:], pages[:-1], out=first[1:])
    return pages[first]
