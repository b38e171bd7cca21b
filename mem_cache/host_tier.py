"""The second tier's bookkeeping: which page of host memory holds which KV page, by its hash.

Life of a host page:

- free → (``keep``) indexed, its bytes on their way → evicted, longest unused first, or dropped → free;
- free → (``reserve``) reserved, for bytes that a store may bring → (``settle``) indexed, or free.

A page that a thread beside the worker's loop reads or writes is *pinned*. Until that has ended, it has no other use,
whatever the index says.

The worker copies between the tiers in the order of its commands, between its steps. So a page may be in the index as
soon as the copy is planned. It may be reused as soon as no plan refers to it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from .errors import DoubleFree, InvariantViolation


class HostTier:
    """``num_pages`` pages, numbered from 0. Hashes are those of ``page_hash.py``."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._index: OrderedDict[bytes, int] = OrderedDict()
        """Longest unused first."""
        self._reserved: set[int] = set()
        self._pins: dict[int, int] = {}
        self._orphans: set[int] = set()
        """Dropped while they were pinned."""
        self.evicted_pages = 0

    def __contains__(self, page_hash: bytes) -> bool:
        return page_hash in self._index

    def __len__(self) -> int:
        return len(self._index)

    @property
    def free_pages(self) -> int:
        """Number of host pages that hold no KV and are not reserved."""
        return len(self._free)

    @property
    def reserved_pages(self) -> int:
        """Number of host pages reserved for bytes that a store may bring."""
        return len(self._reserved)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the host pages of the first ``hashes``, up to the first one that is not in host memory.

        This does not count as a use.
        """
        pages = []
        for page_hash in hashes:
            page = self._index.get(page_hash)
            if page is None:
                break
            pages.append(page)
        return pages

    def page(self, page_hash: bytes) -> int | None:
        """Return the number of the host page with this hash, None if host memory does not have it. This is no use of
        it.
        """
        return self._index.get(page_hash)

    def use(self, hashes: Sequence[bytes]) -> None:
        """Mark the pages of a prefix as used last, as far as they are in host memory. Its end is evicted before its
        beginning.
        """
        for page_hash in reversed(hashes):
            if page_hash in self._index:
                self._index.move_to_end(page_hash)

    def keep(self, page_hash: bytes) -> int | None:
        """Take a host page for the KV of ``page_hash``, index it and return its number; the caller copies the KV.

        The page used longest ago is evicted if none is free. Return None if all are pinned or reserved. The hash must
        not be in host memory already. The page is not pinned.
        """
        page = self._take()
        if page is not None:
            self._index[page_hash] = page
        return page

    def reserve(self, count: int) -> list[int]:
        """Reserve and pin up to ``count`` host pages for bytes that a store may bring, and return their numbers.

        They may be fewer. Pages used longest ago are evicted if too few are free.
        """
        pages: list[int] = []
        while len(pages) < count and (page := self._take()) is not None:
            self._reserved.add(page)
            self._pins[page] = 1
            pages.append(page)
        return pages

    def settle(self, pages: Sequence[int], hashes: Sequence[bytes]) -> None:
        """End the reservation of ``pages``: the first ones now hold the KV of ``hashes`` and are indexed; the others
        are free.

        A page is free, too, if its hash is in host memory already.
        """
        for i, page in enumerate(pages):
            self._reserved.remove(page)
            del self._pins[page]
            if i < len(hashes) and hashes[i] not in self._index:
                self._index[hashes[i]] = page
            else:
                self._free.append(page)

    def pin(self, pages: Iterable[int]) -> None:
        """Pin host pages, by number, so that they are not reused until ``unpin``. Pins of one page are counted.

        Meanwhile a thread beside the worker's loop reads or writes them.
        """
        for page in pages:
            self._pins[page] = self._pins.get(page, 0) + 1

    def unpin(self, pages: Iterable[int]) -> None:
        """Release one pin of each page taken by ``pin()``. Raises ``DoubleFree`` if a page is not pinned.

        After its last pin, a page that is in the index stays there, and may be evicted. A page that was dropped
        meanwhile is free.
        """
        for page in pages:
            left = self._pins.get(page, 0) - 1
            if left < 0:
                raise DoubleFree(f"host page {page} was unpinned more often than pinned")
            if left:
                self._pins[page] = left
                continue
            del self._pins[page]
            if page in self._orphans:
                self._orphans.remove(page)
                self._free.append(page)

    def drop(self, hashes: Iterable[bytes]) -> None:
        """Remove the pages with these hashes from the index. Unknown hashes are ignored.

        A page without pins is free at once, a pinned one after its last pin was released.
        """
        for page_hash in hashes:
            page = self._index.pop(page_hash, None)
            if page is not None:
                self._let_go(page)

    def clear(self) -> int:
        """Remove all pages from the index, and return how many they were."""
        count = len(self._index)
        self.drop(list(self._index))
        return count

    def check_invariants(self) -> None:
        """Raise ``InvariantViolation`` unless every page is in exactly one state, and pins belong to pages in use."""
        indexed = list(self._index.values())
        pages = [*self._free, *indexed, *self._reserved, *self._orphans]
        if sorted(pages) != list(range(self.num_pages)):
            raise InvariantViolation(
                f"of {self.num_pages} host pages {len(self._free)} are free, {len(indexed)} indexed, "
                f"{len(self._reserved)} reserved and {len(self._orphans)} dropped: {len(set(pages))} different ones"
            )
        loose = (self._reserved | self._orphans) - self._pins.keys()
        if loose or self._pins.keys() & set(self._free):
            raise InvariantViolation(f"host pages {sorted(loose)} wait for nobody, or free ones are pinned")

    def _take(self) -> int | None:
        if self._free:
            return self._free.pop()
        for page_hash, page in self._index.items():
            if page not in self._pins:
                del self._index[page_hash]
                self.evicted_pages += 1
                return page
        return None

    def _let_go(self, page: int) -> None:
        if page in self._pins:
            self._orphans.add(page)
        else:
            self._free.append(page)
