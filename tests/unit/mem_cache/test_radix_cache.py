"""The prefix caches: exact slots, splits, locks, and the life of a request's KV."""

import pytest
from support.prefix_caches import ids, make_setup

from pdserve.mem_cache.base_prefix_cache import PrefixMatch
from pdserve.mem_cache.chunk_cache import ChunkCache
from pdserve.mem_cache.errors import InvariantViolation, StaleHold, StaleMatch, UnalignedLength, UnbalancedLock
from pdserve.mem_cache.radix_cache import RadixCache


def test_the_options_choose_the_cache():
    assert isinstance(make_setup().cache, RadixCache)
    assert isinstance(make_setup(disable_radix_cache=True).cache, ChunkCache)


def test_match_is_page_aligned_and_exact():
    s = make_setup()
    assert s.put("aaaabbbb") == [4, 5, 6, 7, 8, 9, 10, 11]
    assert s.match("aaaabbbbcc") == [4, 5, 6, 7, 8, 9, 10, 11]
    assert s.match("aaaabbb") == [4, 5, 6, 7]
    assert s.match("aaaabbbx") == [4, 5, 6, 7]
    assert s.match("aaab") == []
    assert s.match("aaa") == []
    assert s.match("") == []
    s.cache.check_invariants([])


def test_a_prefix_that_parts_inside_a_node_splits_it_at_the_page_border():
    s = make_setup()
    s.put("aaaabbbbcccc")
    assert s.put("aaaabbbbdddd") == [24, 25, 26, 27]
    assert s.match("aaaabbbbddddx") == [*range(4, 12), *range(24, 28)]
    assert s.match("aaaabbbbcccc") == list(range(4, 16))
    assert s.cache.total_size() == 16
    s.cache.check_invariants([])


def test_insert_tells_what_stays_the_callers():
    s = make_setup()
    s.put("aaaabbbb")
    slots = s.allocator.alloc_extend(0, 12, 0)
    assert s.cache.insert(ids("aaaabbbbcccc"), slots) == 8
    s.allocator.free(slots[:8])
    assert s.match("aaaabbbbcccc") == [*range(4, 12), *slots[8:].tolist()]
    s.cache.check_invariants([])
    with pytest.raises(UnalignedLength):
        s.cache.insert(ids("aaaab"), slots[:5])


def test_namespaces_share_nothing():
    s = make_setup()
    plain, tenant = s.put("aaaa"), s.put("aaaa", "tenant")
    assert s.match("aaaa") == plain
    assert s.match("aaaa", "tenant") == tenant
    assert s.match("aaaa", "other") == []
    s.cache.check_invariants([])


def test_the_cache_keeps_its_own_copy_of_the_slots():
    s = make_setup()
    slots = s.allocator.alloc_extend(0, 4, 0)
    s.cache.insert(ids("aaaa"), slots)
    slots[:] = 0
    match = s.cache.match_prefix(ids("aaaa"))
    assert match.slots.tolist() == [4, 5, 6, 7]
    with pytest.raises(ValueError, match="read-only"):
        match.slots[0] = 9


def test_finish_keeps_whole_pages_and_frees_the_rest():
    s = make_setup()
    hold = s.start("aaaabbbbcc")
    s.cache.check_invariants([hold])
    s.cache.cache_finished_req(hold, ids("aaaabbbbc"))
    assert s.match("aaaabbbbcccc") == list(range(4, 12))
    assert (s.cache.evictable_size(), s.cache.protected_size(), s.used()) == (8, 0, 8)
    assert s.table.available_size() == 4
    s.cache.check_invariants([])


def test_release_keeps_only_what_was_shared_before():
    s = make_setup()
    hold = s.start("aaaabbbbcc")
    assert s.cache.cache_unfinished_req(hold, ids("aaaab")) is None
    assert (hold.cached_len, s.cache.protected_size()) == (4, 4)
    s.cache.check_invariants([hold])
    s.cache.release_req(hold)
    assert s.match("aaaabbbb") == [4, 5, 6, 7]
    assert (s.cache.evictable_size(), s.used()) == (4, 4)
    s.cache.check_invariants([])


def test_a_hit_is_written_to_the_row_and_not_computed_again():
    s = make_setup()
    s.put("aaaabbbb")
    hold = s.start("aaaabbbbcc")
    assert s.row(hold) == [*range(4, 12), 12, 13]
    assert hold.cached_len == 8
    s.cache.cache_finished_req(hold, ids("aaaabbbbcc"))
    s.cache.check_invariants([])


def test_duplicates_are_freed_and_replaced_in_the_row():
    s = make_setup()
    first, second = s.start("aaaabbbbcc"), s.start("aaaabbbbdddd")
    assert s.row(second) == list(range(16, 28))
    assert s.cache.cache_unfinished_req(first, ids("aaaabbbbcc")) is None
    rewrite = s.cache.cache_unfinished_req(second, ids("aaaabbbbdddd"))
    assert rewrite.start == 0
    assert rewrite.slots.tolist() == list(range(4, 12))
    assert s.row(second) == [*range(4, 12), *range(24, 28)]
    assert (second.cached_len, s.used()) == (12, 16)
    s.cache.check_invariants([first, second])
    for hold in (first, second):
        s.cache.release_req(hold)
    assert s.cache.evictable_size() == 12
    s.cache.check_invariants([])


def test_a_later_chunk_rewrites_from_where_the_hold_stood():
    s = make_setup()
    hold = s.start("aaaabb")
    s.cache.cache_unfinished_req(hold, ids("aaaabb"))
    other = s.put("aaaabbbb")
    s.grow(hold, 9)
    rewrite = s.cache.cache_unfinished_req(hold, ids("aaaabbbbc"))
    assert (rewrite.start, rewrite.slots.tolist()) == (4, other)
    s.cache.check_invariants([hold])


def test_a_split_under_a_hold_pins_both_parts():
    s = make_setup()
    hold = s.start("aaaabbbb")
    s.cache.cache_unfinished_req(hold, ids("aaaabbbb"))
    s.put("aaaacccc")
    s.cache.check_invariants([hold])
    assert (s.cache.protected_size(), s.cache.evictable_size()) == (8, 4)
    assert s.cache.evict(100) == 4
    assert s.match("aaaabbbb") == list(range(4, 12))


def test_a_prefix_that_is_not_verified_is_not_shared():
    s = make_setup()
    hold = s.start("aaaabbbb")
    hold.verified = False
    assert s.cache.cache_unfinished_req(hold, ids("aaaabbbb")) is None
    s.cache.cache_finished_req(hold, ids("aaaabbbb"))
    assert (s.match("aaaabbbb"), s.used()) == ([], 0)


def test_reset_keeps_what_requests_pin():
    s = make_setup(num_pages=10)
    s.put("aaaabbbb")
    s.put("ddddeeee")
    hold = s.start("aaaa")
    assert s.cache.reset() == 12
    assert s.match("aaaabbbb") == [4, 5, 6, 7]
    s.cache.check_invariants([hold])
    s.cache.release_req(hold)
    assert s.cache.reset() == 4
    assert s.used() == 0
    s.cache.check_invariants([])


@pytest.mark.parametrize(
    "take", [lambda cache: cache.evict(4), lambda cache: cache.evict(8), lambda cache: cache.reset()]
)
def test_a_match_that_was_evicted_can_not_be_held(take):
    s = make_setup()
    s.put("aaaabbbb")
    match = s.cache.match_prefix(ids("aaaabbbb"))
    take(s.cache)
    with pytest.raises(StaleMatch):
        s.cache.hold(s.table.alloc(), match, "")
    assert s.cache.protected_size() == 0


def test_a_match_survives_a_split():
    s = make_setup()
    s.put("aaaabbbb")
    match = s.cache.match_prefix(ids("aaaabbbb"))
    s.put("aaaacccc")
    hold = s.cache.hold(s.table.alloc(), match, "")
    assert (s.row(hold), s.cache.protected_size()) == (list(range(4, 12)), 8)
    s.cache.check_invariants([hold])


@pytest.mark.parametrize("disable_radix_cache", [False, True])
def test_a_hold_is_given_back_once(disable_radix_cache):
    s = make_setup(disable_radix_cache=disable_radix_cache)
    hold = s.start("aaaabb")
    with pytest.raises(StaleHold, match="7 tokens can't have KV in 6 slots"):
        s.cache.cache_finished_req(hold, ids("aaaabbb"))
    s.cache.check_invariants([hold])
    s.cache.release_req(hold)
    taken = s.start("cccc")
    for give_back in (s.cache.release_req, lambda h: s.cache.cache_finished_req(h, ids("aaaa"))):
        with pytest.raises(StaleHold):
            give_back(hold)
    s.cache.check_invariants([taken])


@pytest.mark.parametrize("disable_radix_cache", [False, True])
def test_locks_are_balanced(disable_radix_cache):
    s = make_setup(disable_radix_cache=disable_radix_cache)
    s.put("aaaa")
    node = s.cache.match_prefix(ids("aaaa")).node
    s.cache.inc_lock_ref(node)
    with pytest.raises(InvariantViolation, match="lock_ref 1, 0 requests pin it"):
        s.cache.check_invariants([])
    s.cache.dec_lock_ref(node)
    s.cache.check_invariants([])
    with pytest.raises(UnbalancedLock):
        s.cache.dec_lock_ref(node)


def test_a_node_that_left_can_not_be_locked():
    s = make_setup()
    s.put("aaaa")
    node = s.cache.match_prefix(ids("aaaa")).node
    s.cache.evict(4)
    with pytest.raises(UnbalancedLock):
        s.cache.inc_lock_ref(node)


def test_chunk_cache_keeps_nothing():
    s = make_setup(disable_radix_cache=True)
    assert s.put("aaaa") == []
    hold = s.start("aaaabbbbcc")
    assert s.cache.cache_unfinished_req(hold, ids("aaaabbbb")) is None
    s.cache.check_invariants([hold])
    s.cache.cache_finished_req(hold, ids("aaaabbbbcc"))
    assert s.match("aaaabbbb") == []
    assert (s.cache.total_size(), s.cache.evict(4), s.cache.reset(), s.used()) == (0, 0, 0, 0)
    s.cache.check_invariants([])


def test_an_empty_match_can_be_held():
    s = make_setup()
    match = s.cache.match_prefix(ids("aaaa"))
    assert isinstance(match, PrefixMatch)
    hold = s.cache.hold(s.table.alloc(), match, "tenant")
    s.grow(hold, 4)
    s.cache.cache_finished_req(hold, ids("aaaa"))
    assert s.match("aaaa") == []
    assert s.match("aaaa", "tenant") == [4, 5, 6, 7]
