"""Cases of the transfer benchmark: how many pages of which size move, scattered or in one run."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...mem_cache.kv_pages.page_group import neighbour_spans
from ...messages.base import I32
from .options import Contiguity, TransferBenchOptions

MIB = 1 << 20
SEED = 0


class Case(NamedTuple):
    """``num_pages`` pages, of what was asked for as ``request_mib``."""

    page_bytes: int
    request_mib: float
    contiguity: Contiguity
    num_pages: int

    @property
    def nbytes(self) -> int:
        """Return the bytes that one request moves."""
        return self.num_pages * self.page_bytes


class PageLists(NamedTuple):
    """From which pages of the source to which of the destination, aligned."""

    src: I32
    dst: I32


def cases_of(options: TransferBenchOptions, page_bytes: int) -> list[Case]:
    """Return the cases with pages of ``page_bytes``: one for each request size and contiguity."""
    return [
        Case(page_bytes, size, contiguity, max(1, round(size * MIB / page_bytes)))
        for size in options.request_mib
        for contiguity in options.contiguity
    ]


def pages_of(case: Case, pool_pages: int) -> PageLists:
    """Draw the source and destination pages of ``case`` from pools of ``pool_pages``, without page 0.

    Equal calls give equal pages.
    """
    if case.contiguity == "adjacent":
        run = np.arange(1, case.num_pages + 1, dtype=np.int32)
        return PageLists(run, run)
    rng, every = np.random.default_rng(SEED), np.arange(1, pool_pages, dtype=np.int32)
    while True:
        src, dst = rng.permutation(every)[: case.num_pages], rng.permutation(every)[: case.num_pages]
        # Of few pages some are neighbours by chance, and would be moved as one.
        if len(neighbour_spans(src, dst, case.page_bytes)[0]) == case.num_pages:
            return PageLists(src, dst)
