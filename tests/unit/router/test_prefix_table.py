"""The table of prompts' prefixes: what it finds, what it drops, and the memory that it takes."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.policies.prefix_table import MAX_HOLDERS, PrefixMatch, PrefixTable

BYTES_PER_BLOCK = 250
"""Limit of the memory for a block."""


def test_the_longest_prefix_is_found_of_those_that_are_asked_about():
    table = PrefixTable(100)
    table.record([1, 2, 3], (7,))
    table.record([1, 2], (8,))
    assert table.match([1, 2, 3, 4], {7, 8}) == PrefixMatch(3, [7])
    assert table.match([1, 2, 3, 4], {8}) == PrefixMatch(2, [8])
    assert table.match([1, 2, 5], {7, 8}) == PrefixMatch(2, [8, 7])  # the last one first
    assert table.match([1, 2, 3], {9}) == table.match([4], {7}) == table.match([], {7}) == PrefixMatch(0, [])


def test_the_end_of_the_prompt_that_was_used_longest_ago_is_dropped():
    table = PrefixTable(5)
    table.record([1, 2, 3], (1,))
    table.record([4, 5, 6], (2,))
    assert len(table) == 5
    assert table.match([1, 2, 3], {1}).blocks == 2
    table.record([1], (1,))
    table.record([7], (3,))
    assert (table.match([1, 2, 3], {1}).blocks, table.match([4, 5, 6], {2}).blocks) == (1, 3)
    table.record([8], (3,))
    assert (table.match([1, 2, 3], {1}).blocks, table.match([4, 5, 6], {2}).blocks) == (1, 2)


def test_a_prompt_longer_than_the_table_keeps_its_beginning():
    table = PrefixTable(3)
    table.record([1, 2, 3, 4, 5], (1,))
    assert table.match([1, 2, 3, 4, 5], {1}) == PrefixMatch(3, [1])


def test_a_block_has_a_limited_number_of_holders():
    table = PrefixTable(10)
    for number in range(50):
        table.record([1, 2], (number, number + 1000))
    assert table.match([1], range(2000)).holders == [49, 1049, 48, 1048, 47, 1047, 46, 1046]
    assert MAX_HOLDERS == 8


def test_memory_is_limited():
    tracemalloc.start()
    try:
        capacity = 1 << 13
        table = PrefixTable(capacity)
        before = tracemalloc.get_traced_memory()[0]
        for number in range(60):
            blocks = [hash((number, i)) for i in range(430)]  # a prompt of 220 KB
            for turn in range(MAX_HOLDERS // 2):
                table.record(blocks, (number % 8 + turn, 16 + number % 8 + turn))
            table.record(blocks[:100], (number % 7, 16 + number % 7))
        del blocks
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(table) == capacity
    assert used / capacity <= BYTES_PER_BLOCK


PROMPTS = st.lists(st.integers(0, 2), max_size=5)


@given(st.lists(st.tuples(PROMPTS, st.integers(0, 3), PROMPTS, st.sets(st.integers(0, 3)))))
def test_a_table_with_room_equals_a_list_of_all_prompts(steps):
    """The obvious table compares with every prompt that was sent, the last one first."""
    table = PrefixTable(10_000)
    history: list[tuple[list[int], int]] = []

    def hashes(prompt):
        return [hash(tuple(prompt[:n])) for n in range(1, len(prompt) + 1)]

    for sent, holder, asked, among in steps:
        table.record(hashes(sent), (holder,))
        history.insert(0, (sent, holder))
        known = {h: max(common(prompt, asked) for prompt, one in history if one == h) for _, h in history}
        longest = max((known.get(h, 0) for h in among), default=0)
        holders = [h for _, h in history if h in among and any_of(history, h, asked[:longest])] if longest else []
        found = table.match(hashes(asked), among)
        assert (found.blocks, set(found.holders)) == (longest, set(holders))


def common(a: list[int], b: list[int]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def any_of(history: list[tuple[list[int], int]], holder: int, prefix: list[int]) -> bool:
    return any(one == holder and prompt[: len(prefix)] == prefix for prompt, one in history)
