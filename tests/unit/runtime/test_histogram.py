"""Our histogram counts as the client library's does."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as LibraryHistogram
from support.scrape import Page, page_of

from pdserve.messages.metrics import Histogram
from pdserve.runtime.metrics import histogram, read

BOUNDS = (0.5, 1.0, 2.5)
# Values that floats hold exactly, so that sums don't depend on the order.
VALUES = st.integers(0, 12).map(lambda i: i / 4)


@given(st.lists(st.tuples(VALUES, st.integers(1, 3)), max_size=20))
def test_counts_and_sums_are_those_of_the_library(seen: list[tuple[float, int]]) -> None:
    registry = CollectorRegistry()
    theirs, ours = LibraryHistogram("a_seconds", "a", buckets=BOUNDS, registry=registry), Histogram(BOUNDS)
    for value, times in seen:
        ours.observe(value, times)
        for _ in range(times):
            theirs.observe(value)
    shown = page_of(read((histogram("a_seconds", "a", lambda it: it),), ours))
    pages = (Page(generate_latest(registry).decode()), shown)
    expected, got = ({(s.name, s.labels.get("le")): s.value for s in page.samples} for page in pages)
    assert got == {key: value for key, value in expected.items() if not key[0].endswith("_created")}


def test_it_travels_and_a_copy_stands_still() -> None:
    histogram = Histogram(BOUNDS)
    histogram.observe(0.7)
    copy = histogram.copy()
    histogram.observe(0.7)
    assert copy.counts == [0, 1, 0, 0]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(histogram), type=Histogram) == histogram != copy
    with pytest.raises(msgspec.ValidationError, match="2 counts for 3 bounds"):
        msgspec.msgpack.decode(msgspec.msgpack.encode([BOUNDS, [1, 2]]), type=Histogram)
