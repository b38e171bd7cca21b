"""KV memory is committed ahead of its use, while the worker is idle."""

from __future__ import annotations

import mmap
import resource

import numpy as np
import pytest

from pdserve.mem_cache.kv_pages.region import allocate_region
from pdserve.model_runner.kv.prefault import (
    FIRST_BYTES,
    IDLE_MS,
    LOOK_BYTES,
    RESERVE_SHARE,
    SLICE_BYTES,
    PoolPrefault,
)
from pdserve.runtime.machine.memory import Memory

SLOT_BYTES = 1024
MARGIN = 3 * SLICE_BYTES


def plenty():
    return Memory(1 << 40, 1 << 40)


def faults_while_writing(region, begin, end):
    array = np.frombuffer(region.buffer, dtype=np.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    array[begin : end : mmap.PAGESIZE] = 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def run_until_done(prefault):
    for _ in range(1000):
        if prefault.wait_ms == -1:
            return
        prefault.advance()
    pytest.fail("it never got done")


@pytest.mark.parametrize("shared", [False, True])
def test_committed_memory_takes_no_faults_and_the_rest_still_does(shared):
    region = allocate_region(16 * SLICE_BYTES, shared=shared)
    prefault = PoolPrefault(region, SLOT_BYTES, plenty, MARGIN)
    run_until_done(prefault)
    assert prefault.committed == MARGIN
    assert prefault.committed_privately == (0 if shared else MARGIN)
    pages = SLICE_BYTES // mmap.PAGESIZE
    assert faults_while_writing(region, 0, MARGIN) < pages // 4
    assert faults_while_writing(region, MARGIN, MARGIN + SLICE_BYTES) >= pages // 4
    region.close()


def test_the_margin_moves_with_the_highest_slot_and_ends_with_the_pool():
    region = allocate_region(16 * SLICE_BYTES + mmap.PAGESIZE, shared=False)
    prefault = PoolPrefault(region, SLOT_BYTES, plenty, MARGIN)
    run_until_done(prefault)
    prefault.used(SLICE_BYTES // SLOT_BYTES)
    prefault.used(0)
    run_until_done(prefault)
    assert SLICE_BYTES + MARGIN <= prefault.committed <= 2 * SLICE_BYTES + MARGIN
    prefault.used(region.nbytes // SLOT_BYTES - 1)
    run_until_done(prefault)
    assert prefault.committed == region.nbytes
    region.close()


def test_little_is_committed_before_the_first_step():
    region = allocate_region(4 * FIRST_BYTES, shared=True)
    prefault = PoolPrefault(region, SLOT_BYTES, plenty, 2 * FIRST_BYTES)
    run_until_done(prefault)
    assert prefault.committed == FIRST_BYTES
    prefault.used(0)
    run_until_done(prefault)
    assert 2 * FIRST_BYTES < prefault.committed <= 2 * FIRST_BYTES + SLICE_BYTES
    region.close()


def test_what_a_peer_writes_meanwhile_stays():
    region = allocate_region(2 * SLICE_BYTES, shared=True)
    region.buffer[5] = 42
    run_until_done(PoolPrefault(region, SLOT_BYTES, plenty, MARGIN))
    assert region.buffer[5] == 42
    region.close()


def test_it_waits_for_a_gap_first_and_goes_on_at_once_in_it():
    region = allocate_region(16 * SLICE_BYTES, shared=False)
    prefault = PoolPrefault(region, SLOT_BYTES, plenty, MARGIN)
    assert prefault.wait_ms == IDLE_MS
    prefault.advance()
    assert prefault.wait_ms == 0
    prefault.used(0)
    assert prefault.wait_ms == IDLE_MS
    region.close()


class OldKernel:
    nbytes = 16 * SLICE_BYTES
    fd = None

    def commit(self, begin, end):
        return False


def test_a_kernel_that_cannot_is_asked_once():
    prefault = PoolPrefault(OldKernel(), SLOT_BYTES, plenty, MARGIN)
    prefault.advance()
    prefault.used(1000)
    assert prefault.wait_ms == -1
    assert prefault.committed == 0


def test_memory_of_an_accelerator_is_left_alone():
    prefault = PoolPrefault(None, SLOT_BYTES, plenty)
    prefault.used(1000)
    prefault.advance()
    assert prefault.wait_ms == -1


def test_the_last_of_the_memory_is_not_committed_ahead():
    """A control group of 160 MiB, of which 56 MiB are free: two looks find 16 MiB to spare, the third does not."""
    total, free = 10 * LOOK_BYTES, 10 * LOOK_BYTES // RESERVE_SHARE + 5 * LOOK_BYTES // 2
    region = allocate_region(8 * LOOK_BYTES, shared=False)
    prefault = PoolPrefault(region, SLOT_BYTES, lambda: Memory(total, free - prefault.committed), region.nbytes)
    prefault.used(0)
    for _ in range(8 * LOOK_BYTES // SLICE_BYTES):
        if prefault.wait_ms == -1:
            break
        prefault.advance()
    assert prefault.committed == 2 * LOOK_BYTES
    # Others gave memory back, and a step used more of the pool.
    free += LOOK_BYTES
    prefault.used(0)
    prefault.advance()
    assert prefault.committed == 2 * LOOK_BYTES + SLICE_BYTES
    region.close()
