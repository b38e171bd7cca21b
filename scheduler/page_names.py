"""The names of a request's pages: hashes that chain over its tokens (``mem_cache/page_hash.py``).

Each page is hashed once: a request keeps its names, and its memory lends them to the tree (``KVHold.page_hashes``).
"""

from __future__ import annotations

from typing import NamedTuple

from ..mem_cache.page_hash import further_hashes
from .req import Req


class PageNames(NamedTuple):
    """Computes page names. ``seed`` identifies this model's pages.

    An instance has one kind of names only, since requests keep them.
    """

    seed: bytes
    page_size: int

    def of(self, req: Req, limit: int, first: int = 0) -> list[bytes]:
        """Return the names of the request's whole pages within its first ``limit`` tokens, from page ``first`` on.

        Only known tokens count.
        """
        names, end = req.page_hashes, min(limit, req.known_len)
        pages = end // self.page_size
        if len(names) < pages:
            names += further_hashes(self.seed, req.token_ids[:end], self.page_size, req.msg.extra_key, names)
        return names[first:pages]
