"""The invariant checks of the prefix cache see every kind of damage."""

import pytest
from support.prefix_caches import ids, make_setup

from pdserve.mem_cache.errors import InvariantViolation
from pdserve.mem_cache.tree_node import make_root


def spoil_leak(s, hold):
    s.allocator.alloc_extend(0, 1, 0)


def spoil_shared_slot(s, hold):
    s.table.table[hold.row, 8:10] = [4, 5]


def spoil_row(s, hold):
    s.table.table[hold.row, 0] += 4


def spoil_tail(s, hold):
    s.table.table[hold.row, 9] += 4


def spoil_lock(s, hold):
    hold.node.lock_ref += 1


def spoil_size(s, hold):
    s.cache._evictable += 4


def spoil_free_list(s, hold):
    s.allocator._in_use[8] = True


def spoil_rows(s, hold):
    s.table.alloc()


def spoil_edge(s, hold):
    hold.node.parent = make_root()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_leak, "page 4 has owners: none"),
        (spoil_shared_slot, r"page 1 has owners: prefix cache, request in row 0 \("),
        (spoil_row, "row 0: its first 8 slots are not its node's"),
        (spoil_tail, "request in row 0: its slots are no runs of pages"),
        (spoil_lock, "lock_ref 2, 1 requests pin it"),
        (spoil_size, "tokens are"),
        (spoil_free_list, "page 8 stands 1 times in the free list and is marked in use"),
        (spoil_rows, r"rows \[1\] are either held or handed out, not both"),
        (spoil_edge, "child of its parent False"),
    ],
)
def test_the_invariant_check_sees(spoil, message):
    s = make_setup()
    hold = s.start("aaaabbbbcc")
    s.cache.cache_unfinished_req(hold, ids("aaaabbbb"))
    s.cache.check_invariants([hold])
    spoil(s, hold)
    with pytest.raises(InvariantViolation, match=message):
        s.cache.check_invariants([hold])


def test_the_invariant_check_sees_a_hold_that_is_missing_or_double():
    s = make_setup()
    hold = s.start("aaaa")
    with pytest.raises(InvariantViolation, match="page 1 has owners: none"):
        s.cache.check_invariants([])
    with pytest.raises(InvariantViolation, match="page 1 has owners: request in row 0, request in row 0"):
        s.cache.check_invariants([hold, hold])
