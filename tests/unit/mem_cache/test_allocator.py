"""The page allocator: which slots it gives, and that it refuses what would give a page two owners."""

import numpy as np
import pytest

from pdserve.mem_cache.allocator import PagedTokenToKVPoolAllocator
from pdserve.mem_cache.errors import DoubleFree, InvalidFree, InvariantViolation, MisplacedSlot, UnalignedLength
from pdserve.mem_cache.invariants import Claim, check_pages
from pdserve.mem_cache.pages import ceil_to_page, floor_to_page, slots_to_pages


def i32(*values):
    return np.array(values, dtype=np.int32)


def make_allocator(num_pages=4, page_size=4):
    return PagedTokenToKVPoolAllocator(num_pages * page_size, page_size)


def test_extend_fills_the_tail_then_whole_pages_then_part_of_one():
    allocator = make_allocator()
    first = allocator.alloc_extend(0, 6, last_slot=0)
    assert first.dtype == np.int32
    assert first.tolist() == [4, 5, 6, 7, 8, 9]
    assert allocator.available_size() == 8
    assert allocator.alloc_extend(6, 13, last_slot=9).tolist() == [10, 11, 12, 13, 14, 15, 16]
    assert allocator.available_size() == 0
    allocator.check_invariants()


def test_extend_inside_the_last_page_takes_no_page():
    allocator = make_allocator()
    allocator.alloc_extend(0, 5, 0)
    assert allocator.alloc_extend(5, 7, last_slot=8).tolist() == [9, 10]
    assert allocator.alloc_extend(7, 7, last_slot=10).tolist() == []
    assert allocator.available_size() == 8


def test_extend_from_a_page_border_ignores_the_last_slot():
    allocator = make_allocator()
    assert allocator.alloc_extend(8, 9, last_slot=12345).tolist() == [4]


def test_too_few_pages_change_nothing():
    allocator = make_allocator()
    allocator.alloc_extend(0, 6, 0)
    assert allocator.alloc_extend(6, 17, last_slot=9) is None
    assert allocator.alloc_decode(i32(5, 1, 1), i32(7, 0, 0)) is None
    assert allocator.available_size() == 8
    assert allocator.alloc_extend(6, 16, last_slot=9).tolist() == list(range(10, 20))


def test_decode_takes_a_page_only_where_the_last_is_full():
    allocator = make_allocator(num_pages=6)
    allocator.alloc_extend(0, 3, 0)
    allocator.alloc_extend(0, 8, 0)
    allocator.alloc_extend(0, 1, 0)
    slots = allocator.alloc_decode(i32(4, 9, 2, 1), i32(6, 15, 16, 999))
    assert slots.dtype == np.int32
    assert slots.tolist() == [7, 20, 17, 24]
    assert allocator.available_size() == 0


def test_page_size_one():
    allocator = make_allocator(num_pages=5, page_size=1)
    assert allocator.alloc_extend(0, 2, 0).tolist() == [1, 2]
    assert allocator.alloc_decode(i32(3, 1), i32(2, 0)).tolist() == [3, 4]
    allocator.free(i32(2, 4))
    assert allocator.available_size() == 3


def test_freed_pages_go_out_first_and_in_order():
    allocator = make_allocator()
    slots = allocator.alloc_extend(0, 12, 0)
    allocator.free(slots[4:])
    assert allocator.available_size() == 12
    assert allocator.alloc_extend(0, 12, 0).tolist() == list(range(8, 20))


def test_one_slot_frees_its_page():
    allocator = make_allocator()
    allocator.free(allocator.alloc_extend(0, 5, 0))
    allocator.free(i32())
    assert allocator.available_size() == 16
    allocator.check_invariants()


@pytest.mark.parametrize(
    ("slots", "error"),
    [
        pytest.param([4, 12], DoubleFree, id="free already"),
        pytest.param([4, 8, 4], DoubleFree, id="twice in one call"),
        pytest.param([4, 3], InvalidFree, id="page 0"),
        pytest.param([4, -1], InvalidFree, id="negative"),
        pytest.param([4, 20], InvalidFree, id="beyond the pool"),
    ],
)
def test_a_refused_free_changes_nothing(slots, error):
    allocator = make_allocator()
    held = allocator.alloc_extend(0, 8, 0)
    with pytest.raises(error) as info:
        allocator.free(i32(*slots))
    assert info.type is error
    assert allocator.available_size() == 8
    allocator.check_invariants()
    allocator.free(held)
    assert allocator.available_size() == 16


def test_a_slot_of_another_position_is_refused():
    allocator = make_allocator()
    allocator.alloc_extend(0, 6, 0)
    with pytest.raises(MisplacedSlot, match="slot 8 can't hold position 5"):
        allocator.alloc_extend(6, 7, last_slot=8)
    with pytest.raises(MisplacedSlot, match="slot 13 can't hold position 5"):
        allocator.alloc_extend(6, 7, last_slot=13)
    with pytest.raises(MisplacedSlot, match="slot 6 can't hold position 5"):
        allocator.alloc_decode(i32(5, 7), i32(7, 6))
    assert allocator.available_size() == 8


@pytest.mark.parametrize(("num_slots", "page_size"), [(0, 4), (10, 4), (4, 0)])
def test_a_pool_is_whole_pages(num_slots, page_size):
    with pytest.raises(UnalignedLength):
        PagedTokenToKVPoolAllocator(num_slots, page_size)


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        ([("a", [1]), ("b", [2, 1])], "page 1 has owners: a, b"),
        ([("a", [2])], "page 1 has owners: none"),
        ([("a", [1, 2, 3])], "page 3 has owners: free list, a"),
        ([("a", [1, 2, 9])], "page 9 is claimed and is not in the pool"),
    ],
)
def test_the_page_check_names_page_and_owners(claims, message):
    allocator = make_allocator()
    allocator.alloc_extend(0, 8, 0)
    check_pages(allocator, [Claim("a", i32(1)), Claim("b", i32(2))])
    with pytest.raises(InvariantViolation, match=message):
        check_pages(allocator, [Claim(owner, i32(*pages)) for owner, pages in claims])


def test_page_arithmetic():
    assert [floor_to_page(n, 4) for n in (0, 3, 4, 7)] == [0, 0, 4, 4]
    assert [ceil_to_page(n, 4) for n in (0, 1, 4, 5)] == [0, 4, 4, 8]
    assert slots_to_pages(i32(6, 7, 12, 13, 8, 4), 4).tolist() == [1, 3, 2, 1]
    assert slots_to_pages(i32(), 4).tolist() == []
    assert slots_to_pages(i32(3, 3), 1).tolist() == [3, 3]
