"""The table of prompts' prefixes: what it finds, what it drops, and the memory that it takes."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.policies.prefix_table import MAX_HOLDERS, MAX_OWNERS, PrefixMatch, PrefixTable

BYTES_PER_BLOCK = 250
"""Limit of the memory for a block of a single owner. The dicts of several have more unused entries."""


def test_the_longest_prefix_is_found_of_those_that_are_asked_about():
    table = PrefixTable(100)
    table.record("a", [1, 2, 3], (7,))
    table.record("a", [1, 2], (8,))
    assert table.match("a", [1, 2, 3, 4], {7, 8}) == PrefixMatch(3, [7])
    assert table.match("a", [1, 2, 3, 4], {8}) == PrefixMatch(2, [8])
    assert table.match("a", [1, 2, 5], {7, 8}) == PrefixMatch(2, [8, 7])  # the last one first
    nothing = PrefixMatch(0, [])
    assert table.match("a", [1, 2, 3], {9}) == table.match("a", [4], {7}) == table.match("a", [], {7}) == nothing
    assert table.match("b", [1, 2, 3], {7}) == nothing
    table.record("b", [], (7,))
    assert table.match("b", [1], {7}) == nothing


def test_the_end_of_the_prompt_that_was_used_longest_ago_is_dropped():
    table = PrefixTable(5)
    table.record("a", [1, 2, 3], (1,))
    table.record("a", [4, 5, 6], (2,))
    assert len(table) == 5
    assert table.match("a", [1, 2, 3], {1}).blocks == 2
    table.record("a", [1], (1,))
    table.record("a", [7], (3,))
    assert (table.match("a", [1, 2, 3], {1}).blocks, table.match("a", [4, 5, 6], {2}).blocks) == (1, 3)
    table.record("a", [8], (3,))
    assert (table.match("a", [1, 2, 3], {1}).blocks, table.match("a", [4, 5, 6], {2}).blocks) == (1, 2)


def owned(table: PrefixTable, blocks: dict[str, range]) -> dict[str, int]:
    """Return how much of the prompt that each owner in ``blocks`` has sent is known."""
    return {owner: table.match(owner, one, {1}).blocks for owner, one in blocks.items()}


def test_a_full_table_drops_blocks_of_the_owner_that_has_most():
    table = PrefixTable(100)
    sent = {"a": range(100, 120), "b": range(200, 230), "flood": range(1000, 1300)}
    for owner in ("a", "b", "flood"):
        table.record(owner, sent[owner], (1,))
    assert (len(table), owned(table, sent)) == (99, {"a": 20, "b": 30, "flood": 49})
    for start in range(2000, 9000, 70):
        table.record("flood", range(start, start + 70), (1,))
    assert owned(table, sent) == {"a": 20, "b": 30, "flood": 0}
    table.record("a", range(100, 160), (1,))  # up to an equal share, at the cost of the others that have more
    assert (len(table), owned(table, sent | {"a": range(100, 160)})) == (99, {"a": 35, "b": 30, "flood": 0})
    table.record("flood", sent["flood"], (1,))
    assert owned(table, sent | {"a": range(100, 160)}) == {"a": 34, "b": 30, "flood": 35}


def test_owners_that_have_equally_much_lose_equally_much():
    table = PrefixTable(90)
    sent = {name: range(start, start + 30) for name, start in (("a", 0), ("b", 100), ("c", 200))}
    for owner, blocks in sent.items():
        table.record(owner, blocks, (1,))
    table.record("d", range(300, 330), (1,))
    assert sorted(owned(table, sent | {"d": range(300, 330)}).values()) == [22, 22, 22, 23]


def test_a_table_smaller_than_its_owners_has_one_block_each():
    table = PrefixTable(2)
    for number in range(10):
        table.record(str(number), [number], (1,))
        assert len(table) == min(number + 1, 2)


def test_a_new_owner_takes_the_share_that_was_used_longest_ago():
    table = PrefixTable(10_000)
    table.record("honest", range(100, 150), (1,))
    for number in range(MAX_OWNERS - 1):
        table.record(f"squatter {number}", [1000 + number], (1,))
    table.record("honest", [100], (1,))
    for number in range(MAX_OWNERS - 1):
        table.record(f"later {number}", [2000 + number], (1,))
    assert table.match("honest", range(100, 150), {1}).blocks == 50
    assert not any(table.match(f"squatter {number}", [1000 + number], {1}).blocks for number in range(MAX_OWNERS - 1))
    assert all(table.match(f"later {number}", [2000 + number], {1}).blocks for number in range(MAX_OWNERS - 1))
    assert len(table) == 50 + MAX_OWNERS - 1
    table.record("last", [3000], (1,))
    assert len(table) == MAX_OWNERS
    assert table.match("honest", [100], {1}).blocks == 0


def test_a_full_table_makes_room_for_many_blocks_at_once():
    table = PrefixTable(6400)
    for number in range(64):
        table.record(str(number), range(number << 20, (number << 20) + 100), (1,))
    assert len(table) == 6400
    table.record("0", [1 << 40], (1,))
    assert len(table) == 6300
    assert {len(share) for share in table._shares.values()} == {98, 99}
    for number in range(100):
        table.record("0", [(1 << 41) + number], (1,))
    assert len(table) == 6400


SMALL = st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(1, 40))


@given(st.integers(1, 100), st.lists(SMALL, max_size=60))
def test_an_owner_loses_nothing_of_an_equal_share(capacity, steps):
    table = PrefixTable(capacity)
    for owner, start, length in steps:
        before = {name: len(share) for name, share in table._shares.items()}
        table.record(str(owner), range(start * 20, start * 20 + length), (1,))
        sizes = {name: len(share) for name, share in table._shares.items()}
        assert len(table) == sum(sizes.values()) <= capacity
        assert 0 not in sizes.values()
        least = (capacity - capacity // 64) // len(before | {str(owner): 0})
        assert all(sizes.get(name, 0) >= min(size, least) for name, size in before.items())


def test_a_prompt_longer_than_the_table_keeps_its_beginning():
    table = PrefixTable(3)
    table.record("a", [1, 2, 3, 4, 5], (1,))
    assert table.match("a", [1, 2, 3, 4, 5], {1}) == PrefixMatch(3, [1])


def test_a_block_has_a_limited_number_of_holders():
    table = PrefixTable(10)
    for number in range(50):
        table.record("a", [1, 2], (number, number + 1000))
    assert table.match("a", [1], range(2000)).holders == [49, 1049, 48, 1048, 47, 1047, 46, 1046]
    assert MAX_HOLDERS == 8


@pytest.mark.parametrize(("owners", "most"), [(1, BYTES_PER_BLOCK), (7, 350), (60, 350)])
def test_memory_is_limited(owners, most):
    tracemalloc.start()
    try:
        capacity = 1 << 13
        table = PrefixTable(capacity)
        before = tracemalloc.get_traced_memory()[0]
        for number in range(60):
            owner = str(number % owners)
            blocks = [hash((number, i)) for i in range(430)]  # a prompt of 220 KB
            for turn in range(MAX_HOLDERS // 2):
                table.record(owner, blocks, (number % 8 + turn, 16 + number % 8 + turn))
            table.record(owner, blocks[:100], (number % 7, 16 + number % 7))
        del blocks
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 63 * capacity // 64 <= len(table) <= capacity
    assert used / capacity <= most


def test_owners_that_have_lost_their_blocks_take_no_memory_for_them():
    capacity = 1 << 12
    table = PrefixTable(capacity)
    tracemalloc.start()
    try:
        for owner in range(64):  # each takes as much as it can from the others
            table.record(str(owner), range(owner << 32, (owner << 32) + capacity), (1,))
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 63 * capacity // 64 <= len(table) <= capacity
    assert used / capacity <= 400


PROMPTS = st.lists(st.integers(0, 2), max_size=5)


@given(st.lists(st.tuples(PROMPTS, st.integers(0, 3), PROMPTS, st.sets(st.integers(0, 3)))))
def test_a_table_with_room_equals_a_list_of_all_prompts(steps):
    """The obvious table compares with every prompt that was sent, the last one first."""
    table = PrefixTable(10_000)
    history: list[tuple[list[int], int]] = []

    def hashes(prompt):
        return [hash(tuple(prompt[:n])) for n in range(1, len(prompt) + 1)]

    for sent, holder, asked, among in steps:
        table.record("", hashes(sent), (holder,))
        history.insert(0, (sent, holder))
        known = {h: max(common(prompt, asked) for prompt, one in history if one == h) for _, h in history}
        longest = max((known.get(h, 0) for h in among), default=0)
        holders = [h for _, h in history if h in among and any_of(history, h, asked[:longest])] if longest else []
        found = table.match("", hashes(asked), among)
        assert (found.blocks, set(found.holders)) == (longest, set(holders))


def common(a: list[int], b: list[int]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def any_of(history: list[tuple[list[int], int]], holder: int, prefix: list[int]) -> bool:
    return any(one == holder and prompt[: len(prefix)] == prefix for prompt, one in history)
