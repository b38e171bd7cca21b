"""Which pages of a row a hand-over moves, of each group of the layout.

    pages of the row      0 ······ begin ······ window ······ end
    kept                           ├──────────────────────────┤      what the receiver has not cached already
    behind a window                             ├─────────────┤      and of these what who goes on there still sees

``window`` is where the window begins of whoever goes on from the tokens that are handed over; both sides work it out by
themselves, from the lengths that they have agreed on.
"""

from __future__ import annotations

from typing import NamedTuple


class PageRun(NamedTuple):
    """Pages ``[begin, end)``, and ``[window, end)`` of the group behind a window; ``window`` None: there is none."""

    begin: int
    end: int
    window: int | None = None

    @property
    def counts(self) -> list[int]:
        """Pages of each group."""
        return [end - begin for begin, end in self.within(self.begin, self.end)]

    def within(self, begin: int, end: int) -> list[tuple[int, int]]:
        """What of pages ``[begin, end)`` of the row is moved, of each group: pages of the row."""
        kept = max(begin, self.begin), max(end, self.begin)
        if self.window is None:
            return [kept]
        return [kept, (max(begin, self.window), max(end, self.window))]

    def places(self, begin: int, end: int) -> list[slice]:
        """Where these are among all that is moved of their group."""
        firsts = (self.begin, self.window or 0)
        return [slice(a - first, b - first) for (a, b), first in zip(self.within(begin, end), firsts, strict=False)]
