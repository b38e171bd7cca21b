"""Nodes of the prefix tree that are joined, so that a prompt's pieces are one node."""

import pytest
from support.prefix_caches import PAGE, ids, make_setup, tree

from pdserve.mem_cache.errors import StaleMatch
from pdserve.mem_cache.radix_cache import SHORT_RUN
from pdserve.mem_cache.tree_node import NO_SLOTS, TreeNode, make_root


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
