"""The pages of a row that a hand-over sends, for each group of the layout.

    pages of the row      0 ······ begin ······ window ······ end
    kept                           ├──────────────────────────┤      pages that the receiver has not cached
    with a window                               ├─────────────┤      part of them that later tokens still see

``window`` is the beginning of the window of the token after those that are handed over. Both sides compute it from the
lengths that they have agreed on.
"""

from __future__ import annotations

from typing import NamedTuple


class PageRun(NamedTuple):
    """Pages ``[begin, end)``, and ``[window, end)`` of the group with a window. ``window`` is None without windows."""

    begin: int
    end: int
    window: int | None = None

    @property
    def counts(self) -> list[int]:
        """Number of pages that are sent, for each group of the layout."""
        return [end - begin for begin, end in self.within(self.begin, self.end)]

    def within(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return which of the pages ``[begin, end)`` of the row are sent, as a range of page numbers for each group.

        The first range is that of the group of all pages. A second one follows if there is a group with a window.
        """
        kept = max(begin, self.begin), max(end, self.begin)
        if self.window is None:
            return [kept]
        return [kept, (max(begin, self.window), max(end, self.window))]

    def places(self, begin: int, end: int) -> list[slice]:
        """Return where pages ``[begin, end)`` of the row stand among all pages sent of their group, as a slice for each
        group.
        """
        firsts = (self.begin, self.window or 0)
        return [slice(a - first, b - first) for (a, b), first in zip(self.within(begin, end), firsts, strict=False)]
