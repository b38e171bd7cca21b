"""The names of a request's pages: hashes that chain over its tokens (``mem_cache/page_hash.py``).

Each page is hashed once: a request keeps its names, and its memory lends them to the tree (``KVHold.page_hashes``).
"""

from __future__ import annotations

from typing import NamedTuple

from ..mem_cache.page_hash import further_hashes, model_seed
from ..messages.worker import WorkerReady
from .options import SchedulerOptions
from .req import Req


class PageNames(NamedTuple):
    """Computes page names. ``seed`` identifies this model's pages.

    An instance has one kind of names only, since requests keep them.
    """

    seed: bytes
    page_size: int

    def of(self, req: Req, limit: int, first: int = 0) -> list[bytes]:
        """Return the names (hashes) of the request's whole pages within its first ``limit`` tokens, from page ``first``
        on.

        Tokens that are not known yet do not count.
        """
        names, end = req.page_hashes, min(limit, req.known_len)
        pages = end // self.page_size
        if len(names) < pages:
            names += further_hashes(self.seed, req.token_ids[:end], self.page_size, req.msg.extra_key, names)
        return names[first:pages]


def make_page_names(options: SchedulerOptions, worker: WorkerReady) -> PageNames:
    """Return the ``PageNames`` by which this instance's pages are found; equal models and layouts have equal names."""
    # Pages rounded in host memory have names of their own: instances that keep pages as they are must not find them.
    is_rounded = worker.host_pages and options.hicache_host_dtype != "auto"
    rounding = f" in {options.hicache_host_dtype}" if is_rounded else ""
    return PageNames(model_seed(worker.fingerprint + rounding, worker.layout), options.page_size)
