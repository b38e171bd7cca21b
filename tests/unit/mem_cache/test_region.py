"""The KV pool's memory."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from pdserve.mem_cache.kv_pages.region import RegionError, allocate_region, map_region
from pdserve.runtime.machine.memory import host_memory

NBYTES = 3 * mmap.PAGESIZE


@pytest.mark.parametrize("shared", [False, True])
def test_region_is_zeroed_and_writable(shared):
    region = allocate_region(NBYTES, shared=shared)
    array = np.frombuffer(region.buffer, dtype=np.uint8)
    assert len(array) == region.nbytes == NBYTES
    assert not array.any()
    array[-1] = 7
    assert region.buffer[-1] == 7
    del array
    region.close()
    assert region.buffer.closed


def test_shared_region_is_one_memory_for_all_who_map_its_descriptor():
    region = allocate_region(NBYTES, shared=True)
    assert region.fd is not None
    other = mmap.mmap(region.fd, NBYTES)
    other[5] = 42
    assert region.buffer[5] == 42
    other.close()
    region.close()


def test_a_holder_of_the_descriptor_cannot_shrink_the_pool():
    region = allocate_region(NBYTES, shared=True)
    assert region.fd is not None
    with pytest.raises(PermissionError):
        os.ftruncate(region.fd, 0)
    region.close()


@pytest.mark.parametrize("shared", [False, True])
def test_closing_under_an_array_leaves_the_array_usable(shared):
    region = allocate_region(NBYTES, shared=shared)
    array = np.frombuffer(region.buffer, dtype=np.uint8)
    region.close()
    array[:] = 9
    assert region.fd is None
    assert int(array.sum()) == 9 * NBYTES


@pytest.mark.parametrize("shared", [False, True])
def test_more_can_be_reserved_than_there_is(shared):
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
        pytest.skip("this system counts what is reserved")
    nbytes = 4 * host_memory().total // mmap.PAGESIZE * mmap.PAGESIZE
    region = allocate_region(nbytes, shared=shared)
    region.buffer[nbytes - 1] = 7
    region.give_back(nbytes - mmap.PAGESIZE)
    assert region.buffer[nbytes - 1] == 0
    region.close()


def test_impossible_sizes_say_what_to_do():
    with pytest.raises(RegionError, match="at least one byte"):
        allocate_region(0, shared=False)
    with pytest.raises(RegionError, match="--max-total-tokens"):
        allocate_region(1 << 60, shared=True)


@pytest.mark.parametrize("nbytes", [2 * NBYTES, -1, 1 << 70])
def test_the_descriptor_of_a_pool_that_can_not_be_mapped_is_closed(nbytes):
    region = allocate_region(NBYTES, shared=True)
    assert region.fd is not None
    fd = os.dup(region.fd)
    with pytest.raises(RegionError, match="can't be mapped"):
        map_region(fd, nbytes)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    region.close()
