"""Pages that a hand-over moves of each group, compared with what later tokens see one by one."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from support.sim import SimWindow, make_options

from pdserve.mem_cache.page_run import PageRun
from pdserve.scheduler.kv_memory import KVMemory
from pdserve.scheduler.memory_terms import PoolSizes

SIZE = 4


@given(window=st.integers(1, 30), length=st.integers(1, 90), prefix=st.integers(0, 22), is_prompt=st.booleans())
def test_window_pages_are_those_that_are_seen(window, length, prefix, is_prompt):
    sizes = PoolSizes(128, *SimWindow(window, 128))
    memory = KVMemory(make_options(max_total_tokens=128), sizes, 120)
    last = -(-length // SIZE)
    prefix = min(prefix, last)
    goes_on = length - 1 if is_prompt else length
    run = memory.pinned.run(prefix * SIZE, length, goes_on)
    assert (run.begin, run.end) == (prefix, last)
    begins = goes_on // SIZE * SIZE  # another answer to the same prompt begins with this page
    seen = {position // SIZE for position in range(max(0, begins + 1 - window), length)}
    assert set(range(run.window, run.end)) == {page for page in seen if page >= prefix}
    assert run.counts == [last - prefix, last - run.window]


@given(begin=st.integers(0, 9), more=st.integers(0, 9), window=st.integers(0, 9), cuts=st.sets(st.integers(0, 20)))
def test_chunks_are_all_of_it_in_order(begin, more, window, cuts):
    end = begin + more
    run = PageRun(begin, end, min(begin + window, end))
    bounds = sorted({begin, end, *(cut for cut in cuts if begin < cut < end)})
    kept, windowed = [], []
    for a, b in itertools.pairwise(bounds):
        for pages, (first, last) in zip((kept, windowed), run.within(a, b), strict=True):
            pages.extend(range(first, last))
        for (first, last), place, origin in zip(run.within(a, b), run.places(a, b), (begin, run.window), strict=True):
            assert (place.start + origin, place.stop + origin) == (first, last)
    assert kept == list(range(begin, end))
    assert windowed == list(range(run.window, end))


def test_without_windows_there_is_one_group():
    run = PageRun(2, 7)
    assert run.counts == [5]
    assert run.within(0, 4) == [(2, 4)]
    assert run.places(3, 9) == [slice(1, 7)]
