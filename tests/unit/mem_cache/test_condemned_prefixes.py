"""Prefixes that requests failed on: when they are condemned, and that nothing finds them then."""

from support.prefix_caches import PAGE, ids, make_setup

from pdserve.mem_cache.radix_cache import RadixCache
from pdserve.mem_cache.tree_node import TreeNode


def test_what_is_condemned_is_not_found_and_goes_with_its_last_pin():
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
    """Run a request that computes ``text``. A token was sampled from all of it, or from its ``proven`` first tokens."""
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
    # Since the last failure no request has gone on from it.
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

    def stored(self, parent, hashes, key, pages):
        pass

    def leaving(self, hashes, pages):
        pass

    def removed(self, hashes):
        self.hashes += hashes

    def cleared(self):
        pass


def test_hiding_a_deep_prefix_costs_a_few_looks_at_each_node(monkeypatch):
    """Also where another one is hidden, which a request pins."""
    pages = 200
    s, events = make_setup(num_pages=pages + 4), Removals()
    s.cache = RadixCache(s.allocator, s.table, watchers=[events])
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
