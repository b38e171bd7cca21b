"""How API keys share what is limited: queues in which they take turns, and amounts of which each may have a part."""

from __future__ import annotations

import pytest

from pdserve.messages.error_codes import KEY_LIMIT_EXCEEDED, RATE_LIMIT_EXCEEDED
from pdserve.runtime.key_queue import KeyQueue
from pdserve.server.key_shares import KeyShares


def fill(shares: KeyShares, key: str) -> int:
    while shares.has_room(key, 1):
        shares.take(key, 1)
    return shares.of(key)


def test_whatever_some_keys_hold_another_one_has_room() -> None:
    shares = KeyShares(64)
    assert [fill(shares, key) for key in "abcd"] == [32, 16, 8, 4]
    assert shares.held == 60


def test_a_share_counts_what_is_to_be_taken_at_once() -> None:
    shares = KeyShares(64)
    assert shares.has_room("a", 32)
    assert not shares.has_room("a", 33)
    shares.take("a", 30)
    assert shares.has_room("a", 2)
    assert not shares.has_room("a", 3)


def test_a_refusal_is_the_keys_own_only_while_another_key_has_room() -> None:
    shares = KeyShares(8)
    fill(shares, "a")
    assert shares.refusal_code("a", 1) == KEY_LIMIT_EXCEEDED
    fill(shares, "b")
    assert [shares.refusal_code(key, 1) for key in "ab"] == [KEY_LIMIT_EXCEEDED] * 2
    fill(shares, "c")
    assert [shares.refusal_code(key, 1) for key in "abcd"] == [RATE_LIMIT_EXCEEDED] * 4


@pytest.mark.parametrize("everybody", ["", "(admin)"])
def test_a_name_that_all_clients_share_has_no_limit_of_its_own(everybody: str) -> None:
    shares = KeyShares(8)
    fill(shares, everybody)
    assert shares.refusal_code(everybody, 1) == RATE_LIMIT_EXCEEDED


def test_two_keys_come_to_equal_shares_as_the_first_gives_back() -> None:
    shares = KeyShares(63)
    fill(shares, "a")
    fill(shares, "b")
    while shares.of("a") > 21:
        shares.give_back("a", 1)
    assert fill(shares, "b") == 21
    assert not shares.has_room("a", 1)


def test_what_is_given_back_is_forgotten() -> None:
    shares = KeyShares(4)
    shares.take("a", 2)
    shares.give_back("a", 2)
    assert (shares.held, shares.of("a"), len(shares._of)) == (0, 0, 0)


def test_keys_take_turns_and_keep_their_order() -> None:
    queue = KeyQueue[str]()
    for item in ("a1", "a2", "a3", "b1", "c1", "b2"):
        queue.append(item[0], item)
    queue.remove("c", "c1")
    assert [queue.pop(), queue.pop()] == ["a1", "b1"]
    queue.append("d", "d1")
    assert [queue.pop() for _ in range(4)] == ["a2", "b2", "d1", "a3"]
    assert not queue
    with pytest.raises(KeyError):
        queue.pop()
