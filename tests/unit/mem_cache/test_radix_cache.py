"""The prefix caches: exact slots, splits, locks, eviction order, and the life of a request's KV."""

from dataclasses import dataclass

import numpy as np
import pytest

from pdserve.mem_cache.allocator import PagedTokenToKVPoolAllocator
from pdserve.mem_cache.base_prefix_cache import BasePrefixCache, PrefixMatch
from pdserve.mem_cache.chunk_cache import ChunkCache
from pdserve.mem_cache.errors import InvariantViolation, StaleHold, StaleMatch, UnalignedLength, UnbalancedLock
from pdserve.mem_cache.eviction import SWEEP_SLACK, EvictionHeap, lru
from pdserve.mem_cache.factory import make_prefix_cache
from pdserve.mem_cache.radix_cache import SHORT_RUN, RadixCache
from pdserve.mem_cache.req_to_token_pool import ReqToTokenPool
from pdserve.mem_cache.tree_node import NO_SLOTS, TreeNode, make_root
from pdserve.runtime.options import ServerOptions

PAGE = 4


def ids(text):
    """One token for each letter."""
    return np.array([ord(c) for c in text], dtype=np.int32)


@dataclass
class Setup:
    """A cache, with what a scheduler does around it."""

    allocator: PagedTokenToKVPoolAllocator
    table: ReqToTokenPool
    cache: BasePrefixCache

    def put(self, text, extra_key=""):
        """Cache ``text`` without a request; returns its newly cached slots."""
        slots = self.allocator.alloc_extend(0, len(text), 0)
        known = self.cache.insert(ids(text), slots, extra_key)
        self.allocator.free(slots[:known])
        return slots[known:].tolist()

    def start(self, text, extra_key=""):
        """Admit a request and give all of its prompt slots."""
        hold = self.cache.hold(self.table.alloc(), self.cache.match_prefix(ids(text), extra_key), extra_key)
        self.grow(hold, len(text))
        return hold

    def grow(self, hold, seq_len):
        row = self.table.table[hold.row]
        row[hold.kv_len : seq_len] = self.allocator.alloc_extend(hold.kv_len, seq_len, int(row[hold.kv_len - 1]))
        hold.kv_len = seq_len

    def row(self, hold):
        return self.table.table[hold.row, : hold.kv_len].tolist()

    def match(self, text, extra_key=""):
        return self.cache.match_prefix(ids(text), extra_key).slots.tolist()

    def used(self):
        return self.allocator.size - self.allocator.available_size()


def make_setup(num_pages=8, max_reqs=4, context_len=64, **options) -> Setup:
    allocator = PagedTokenToKVPoolAllocator(num_pages * PAGE, PAGE)
    table = ReqToTokenPool(max_reqs, context_len)
    return Setup(allocator, table, make_prefix_cache(ServerOptions(**options), allocator, table))


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


def test_eviction_trims_only_what_is_needed():
    s = make_setup()
    s.put("aaaabbbbcccc")
    assert s.cache.evict(0) == 0
    assert s.cache.evict(1) == 4
    assert s.match("aaaabbbbcccc") == list(range(4, 12))
    assert s.cache.evict(5) == 8
    assert (s.cache.total_size(), s.used()) == (0, 0)
    assert s.cache.evict(1) == 0
    s.cache.check_invariants([])


def test_a_parent_follows_its_last_child():
    s = make_setup()
    s.put("aaaabbbb")
    s.put("aaaacccc")
    assert s.cache.evict(12) == 12
    s.cache.check_invariants([])


@pytest.mark.parametrize(
    ("policy", "order"),
    [("lru", "bdac"), ("mru", "cadb"), ("fifo", "abcd"), ("lfu", "bdca")],
)
def test_eviction_policies(policy, order):
    s = make_setup(radix_eviction_policy=policy)
    for letter in "abcd":
        s.put(letter * PAGE)
    for letter in "adac":
        if letter != "d":
            s.match(letter * PAGE)
        else:  # d is used without a hit
            s.put(letter * PAGE)
    gone = []
    for _ in range(4):
        before = {n.edge for n in tree(s)}
        assert s.cache.evict(1) == PAGE
        (edge,) = before - {n.edge for n in tree(s)}
        gone.append(chr(np.frombuffer(edge, dtype=np.int32)[0]))
        s.cache.check_invariants([])
    assert "".join(gone) == order


def tree(s):
    """All nodes but the root."""
    *_, root = s.cache.match_prefix(ids("")).node.path_up()
    return [n for n in root.subtree() if n is not root]


def test_a_held_leaf_is_evictable_again_after_release():
    s = make_setup()
    s.put("aaaa")
    hold = s.start("aaaabbbb")
    assert s.cache.evict(100) == 0
    s.cache.release_req(hold)
    assert s.cache.evict(100) == 4


def test_what_is_condemned_is_found_by_nobody_and_goes_with_its_last_pin():
    s = make_setup()
    s.put("aaaabbbb")
    s.put("aaaacccc", "tenant")
    first, second = s.start("aaaabbbbc"), s.start("aaaadddd")
    s.cache.cache_unfinished_req(second, ids("aaaadddd"))
    s.cache.condemn(ids("aaaaxyz"))
    assert (s.match("aaaabbbb"), s.match("aaaadddd")) == ([], [])
    assert len(s.match("aaaacccc", "tenant")) == 8
    assert s.cache.evict(100) == 8
    s.cache.check_invariants([first, second])
    # Neither what goes on from it nor what ends there comes back.
    s.grow(first, 16)
    assert s.cache.cache_unfinished_req(first, ids("aaaabbbbccccdddd")) is None
    s.cache.cache_finished_req(first, ids("aaaabbbbccccdddd"))
    s.cache.check_invariants([second])
    assert s.match("aaaabbbb") == []
    fresh = s.start("aaaabbbb")
    s.cache.cache_finished_req(fresh, ids("aaaabbbb"))
    s.cache.condemn(ids("aaaa"))
    s.cache.release_req(second)
    s.cache.check_invariants([])
    assert s.used() == 0


def end_well(s, text, proven=None):
    """A request computes ``text``, and a token was sampled from all of it, or from its ``proven`` first tokens."""
    hold = s.start(text)
    hold.proven = len(text) if proven is None else proven
    s.cache.cache_finished_req(hold, ids(text))


def end_badly(s, text):
    hold = s.start(text)
    s.cache.cache_unfinished_req(hold, ids(text))
    hold.verified = False
    kept = s.cache.condemn(ids(text), hold=hold)
    s.cache.cache_finished_req(hold, ids(text))
    s.cache.check_invariants([])
    return kept


def test_what_was_good_for_others_is_condemned_with_the_second_failure_only():
    s = make_setup()
    end_well(s, "aaaabbbbcccc")
    assert end_badly(s, "aaaabbbbdddd") == 8
    assert len(s.match("aaaabbbbcccc")) == 12
    assert s.match("aaaabbbbdddd") == list(range(4, 12))
    end_well(s, "aaaabbbb")
    assert end_badly(s, "aaaabbbbeeee") == 8
    # Since the last failure nobody has gone on from it.
    assert end_badly(s, "aaaaffff") == 0
    assert (s.match("aaaabbbbcccc"), s.used()) == ([], 0)


def test_a_failure_condemns_no_more_than_the_request_computed_itself():
    s = make_setup(num_pages=12)
    end_well(s, "aaaabbbbcccc")
    end_well(s, "ddddeeee")
    first, second = s.start("aaaabbbbgggg"), s.start("aaaabbbbgggg")
    for hold in (first, second):
        s.cache.cache_unfinished_req(hold, ids("aaaabbbbgggg"))
    # Both fail for the pages that they share, which says nothing of those before: one failure.
    for hold in (first, second):
        hold.verified = False
        assert s.cache.condemn(ids("aaaabbbbgggg"), hold=hold) == 8
    s.cache.check_invariants([first, second])
    for hold in (first, second):
        s.cache.release_req(hold)
    assert [len(s.match(text)) for text in ("aaaabbbbcccc", "aaaabbbbgggg", "ddddeeee")] == [12, 8, 8]
    s.cache.check_invariants([])


def test_tokens_that_gave_none_yet_are_not_proven():
    s = make_setup()
    end_well(s, "aaaabbbbcccc", proven=11)
    assert end_badly(s, "aaaabbbbccccdddd") == 0
    first = s.start("aaaabbbb")
    s.cache.cache_unfinished_req(first, ids("aaaabbbb"))
    first.proven = 8
    s.grow(first, 12)
    s.cache.cache_finished_req(first, ids("aaaabbbbcccc"))
    assert end_badly(s, "aaaabbbbccccdddd") == 8


def test_what_is_bad_from_a_known_page_on_is_kept_up_to_there():
    s = make_setup()
    end_well(s, "aaaabbbbcccc")
    end_well(s, "aaaabbbbdddd")
    hold = s.start("aaaabbbbcccc")
    assert s.cache.condemn(ids("aaaabbbbcccc"), hold=hold, start=6) == 4
    assert [s.match(text) for text in ("aaaabbbbcccc", "aaaabbbbdddd")] == [[4, 5, 6, 7]] * 2
    s.cache.check_invariants([hold])
    s.cache.release_req(hold)
    # It is known where it began, so what comes before stays proven.
    assert end_badly(s, "aaaaeeee") == 4


class Removals:
    """Pages that the tree's events said were removed."""

    def __init__(self):
        self.hashes = []

    def seed(self):
        return b"seed"

    def stored(self, parent, hashes, key):
        pass

    def removed(self, hashes):
        self.hashes += hashes

    def cleared(self):
        pass


def test_hiding_a_deep_prefix_costs_a_few_looks_at_each_node(monkeypatch):
    """Also where another one is hidden, which a request pins."""
    pages = 200
    s, events = make_setup(num_pages=pages + 4), Removals()
    s.cache = RadixCache(s.allocator, s.table, events=events)
    s.put("aaaa")
    pinned = s.start("aaaa")
    s.cache.condemn(ids("aaaa"))
    text = "".join(f"{i:04}" for i in range(pages))
    s.put(text)
    for end in range(len(text) - PAGE, 0, -PAGE):
        s.match(text[:end])
    looks = 0
    for name in ("path_up", "subtree"):
        inner = getattr(TreeNode, name)

        def counted(self, inner=inner):
            nonlocal looks
            for node in inner(self):
                looks += 1
                yield node

        monkeypatch.setattr(TreeNode, name, counted)
    s.cache.condemn(ids(text))
    assert looks <= 4 * pages
    assert len(set(events.hashes)) == len(events.hashes) == pages + 1
    assert s.match(text) == []
    s.cache.check_invariants([pinned])


def test_a_smaller_pool_sorts_the_leaves_once(monkeypatch):
    pages = 100
    s = make_setup(num_pages=pages)
    for i in range(pages):
        s.put(f"{i:04}")
    sweeps = []
    inner = EvictionHeap.sweep
    monkeypatch.setattr(EvictionHeap, "sweep", lambda heap: (sweeps.append(len(heap._entries)), inner(heap)))
    s.allocator.resize(pages // 2)
    s.cache.withdraw()
    assert len(tree(s)) == pages // 2
    assert sum(sweeps) <= 2 * pages
    s.cache.check_invariants([])


def test_a_prefix_that_is_not_verified_is_shared_by_nobody():
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


def test_the_heap_stays_small_when_leaves_are_used_and_not_evicted():
    root = make_root()
    leaf = TreeNode(root, b"a", b"a", NO_SLOTS, 1)
    heap = EvictionHeap(lru)
    for _ in range(10 * SWEEP_SLACK):
        heap.push(leaf)
    assert len(heap._entries) <= SWEEP_SLACK + 2
    assert heap.nodes() == [leaf]
    assert heap.peek() is leaf


def test_the_pieces_of_a_prompt_are_joined():
    """Walks, locks and the search for memory of its own go node by node."""
    count = 2048
    s = make_setup(num_pages=count + 2, context_len=(count + 1) * PAGE)
    text = "".join(f"{i:04}" for i in range(count))
    tokens = ids(text)
    hold = s.start("")
    most = copied = 0
    for end in range(PAGE, len(text) + 1, PAGE):
        s.grow(hold, end)
        before = {id(node): node.num_tokens for node in hold.node.path_up()}
        s.cache.cache_unfinished_req(hold, tokens[:end])
        nodes = list(hold.node.path_up())[:-1]
        most = max(most, len(nodes))
        copied += sum(node.num_tokens for node in nodes if node.num_tokens != before.get(id(node)))
    assert most <= 12
    assert copied <= 12 * len(text)
    s.cache.check_invariants([hold])
    assert s.match(text + "x") == s.row(hold)
    s.cache.cache_finished_req(hold, ids(text))
    assert len(s.match(text)) == len(text)
    s.cache.check_invariants([])


def test_what_requests_end_in_is_not_joined_with_what_follows():
    s = make_setup()
    first = s.start("aaaa")
    s.cache.cache_unfinished_req(first, ids("aaaa"))
    second = s.start("aaaabbbbcccc")
    s.cache.cache_unfinished_req(second, ids("aaaabbbb"))
    s.cache.cache_unfinished_req(second, ids("aaaabbbbcccc"))
    assert [node.num_tokens for node in second.node.path_up()] == [8, 4, 0]
    s.cache.check_invariants([first, second])
    s.cache.release_req(first)
    s.cache.check_invariants([second])
    s.cache.release_req(second)
    s.cache.check_invariants([])


@pytest.mark.parametrize("field", ["lock_ref", "proven", "created", "last_access", "hit_count", "priority"])
def test_nodes_that_differ_to_locks_or_policies_are_not_joined(field):
    root = make_root()
    upper = TreeNode(root, b"a", b"a", NO_SLOTS, 1)
    lower = upper.children[b"b"] = TreeNode(upper, b"b", b"b", NO_SLOTS, 1)
    assert upper.is_piece_before(lower)
    assert not root.is_piece_before(upper)
    setattr(upper, field, 7)
    assert not upper.is_piece_before(lower)
    setattr(lower, field, 7)
    assert upper.is_piece_before(lower)
    upper.children[b"c"] = TreeNode(upper, b"c", b"c", NO_SLOTS, 1)
    assert not upper.is_piece_before(lower)


def test_a_match_in_a_piece_that_was_joined_can_not_be_held():
    s = make_setup()
    hold = s.start("aaaa")
    s.cache.cache_unfinished_req(hold, ids("aaaa"))
    match = s.cache.match_prefix(ids("aaaa"))
    hold.node.hit_count = 0
    s.grow(hold, 8)
    s.cache.cache_unfinished_req(hold, ids("aaaabbbb"))
    assert [node.num_tokens for node in hold.node.path_up()] == [8, 0]
    with pytest.raises(StaleMatch):
        s.cache.hold(s.table.alloc(), match, "")


def test_a_long_run_that_goes_page_by_page_is_not_copied_each_time():
    s = make_setup(num_pages=8 * SHORT_RUN // PAGE)
    s.put("".join(f"{i:04}" for i in range(8 * SHORT_RUN // PAGE)))
    copied = 0
    while len(left := tree(s)):
        before = {id(node): node.num_tokens for node in left}
        assert s.cache.evict(1) == PAGE
        copied += sum(node.num_tokens for node in tree(s) if node.num_tokens != before.get(id(node)))
    assert copied <= SHORT_RUN // PAGE * 8 * SHORT_RUN
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


@pytest.mark.parametrize("how", ["inserted", "found", "computed twice", "computed in a piece"])
def test_a_shared_prefix_is_worth_as_much_as_the_dearest_request_that_uses_it(how):
    s = make_setup(radix_eviction_policy="priority")
    s.put("aaaa")
    slots = s.allocator.alloc_extend(0, 4, 0)
    s.cache.insert(ids("bbbb"), slots, priority=3)
    if how == "inserted":
        slots = s.allocator.alloc_extend(0, 4, 0)
        assert s.cache.insert(ids("aaaa"), slots, priority=5) == 4
        s.allocator.free(slots)
    else:
        tokens = ids("aaaa") if how != "computed in a piece" else ids("aaaacccc")
        match = s.cache.match_prefix(tokens if how == "found" else tokens[:0])
        hold = s.cache.hold(s.table.alloc(), match, "", priority=5)
        s.grow(hold, len(tokens))
        s.cache.cache_unfinished_req(hold, tokens)
        s.cache.cache_finished_req(hold, tokens)
        if how == "computed in a piece":
            assert s.cache.evict(4) == 4  # the end of it, which has no user of less worth, is a leaf of worth 5
            assert s.match("bbbb") == []
            assert len(s.match("aaaacccc")) == 8
            return
    s.cache.evict(4)
    assert s.match("bbbb") == []
    assert len(s.match("aaaa")) == 4
