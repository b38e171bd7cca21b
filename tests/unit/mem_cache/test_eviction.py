"""Eviction from the prefix cache: its order, its cost, and what a shared prefix is worth."""

import numpy as np
import pytest
from support.prefix_caches import PAGE, ids, make_setup, tree

from pdserve.mem_cache.eviction import SWEEP_SLACK, EvictionHeap
from pdserve.mem_cache.eviction_policies import lru
from pdserve.mem_cache.tree_node import NO_SLOTS, TreeNode, make_root


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


def test_a_held_leaf_is_evictable_again_after_release():
    s = make_setup()
    s.put("aaaa")
    hold = s.start("aaaabbbb")
    assert s.cache.evict(100) == 0
    s.cache.release_req(hold)
    assert s.cache.evict(100) == 4


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


def test_the_heap_stays_small_when_leaves_are_used_and_not_evicted():
    root = make_root()
    leaf = TreeNode(root, b"a", b"a", NO_SLOTS, 1)
    heap = EvictionHeap(lru)
    for _ in range(10 * SWEEP_SLACK):
        heap.push(leaf)
    assert len(heap._entries) <= SWEEP_SLACK + 2
    assert heap.nodes() == [leaf]
    assert heap.peek() is leaf


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
