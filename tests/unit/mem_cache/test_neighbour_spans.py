"""Spans of pages that are neighbours on both sides of a transfer: together they are the pages, in order."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pdserve.mem_cache.kv_pages.page_group import Spans, neighbour_spans

PAGE_BYTES = 48


def bytes_of(spans: Spans) -> list[int]:
    """Return the offset of each byte, in order."""
    return [place for begin, size in spans.tolist() for place in range(begin, begin + size)]


def bytes_of_pages(pages: list[int]) -> list[int]:
    return [page * PAGE_BYTES + i for page in pages for i in range(PAGE_BYTES)]


def drawn(rng: random.Random, count: int) -> list[int]:
    """Draw pages with runs of neighbours."""
    pages: list[int] = []
    while len(pages) < count:
        begin = rng.randrange(1000)
        pages += range(begin, begin + rng.randrange(1, 6))
    return pages[:count]


@pytest.mark.parametrize("seed", range(40))
def test_spans_are_the_pages_in_order_and_as_long_as_both_sides_allow(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randrange(1, 60)
    src, dst = drawn(rng, count), drawn(rng, count)
    local, remote = neighbour_spans(np.array(src, np.int32), np.array(dst, np.int32), PAGE_BYTES)
    assert local[:, 1].sum() == count * PAGE_BYTES
    assert remote[:, 1].tolist() == local[:, 1].tolist()
    assert bytes_of(local) == bytes_of_pages(src)
    assert bytes_of(remote) == bytes_of_pages(dst)
    breaks = sum(src[i] != src[i - 1] + 1 or dst[i] != dst[i - 1] + 1 for i in range(1, count))
    assert len(local) == len(remote) == 1 + breaks


def test_no_pages_have_no_spans() -> None:
    none = np.empty(0, np.int32)
    local, remote = neighbour_spans(none, none, PAGE_BYTES)
    assert local.shape == remote.shape == (0, 2)
