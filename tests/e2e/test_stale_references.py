"""References to KV that isn't there any more, or never was, never become text.

In vLLM's issue 52234 five kinds of them got answers and 200: an unknown reference, numbers out of range, a used-up
reference, one to memory that has another prompt by now, and one that came too late.
"""

from __future__ import annotations

import itertools
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest
from support.processes import Launched, Pair, pd_pair, wait_until

ONE, OTHER = list(range(100, 160)), list(range(300, 360))
TOKENS = 8
WAIT_SECONDS = 5
"""Time that either side waits for the other; on a busy machine one may be late by a second."""

# test_handover_rooms.py, a unit test, has each kind by messages, and simulated pairs (test_world.py) have all orders.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pair(tmp_path_factory, tiny_args):
    folder = tmp_path_factory.mktemp("stale")
    with pd_pair(folder, "tcp", *tiny_args, "--disaggregation-bootstrap-timeout", str(WAIT_SECONDS)) as pair:
        yield pair
        pair.assert_all_returned()


@pytest.fixture(scope="module")
def answers(alone):
    return [alone.generate(**body(prompt))["output_ids"] for prompt in (ONE, OTHER)]


def body(prompt: list[int]) -> dict:
    return {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}}


class Legs:
    """Both legs of requests, each asked by itself."""

    def __init__(self, pair: Pair, pool: ThreadPoolExecutor) -> None:
        self._pair = pair
        self._pool = pool
        self._port = pair.prefill.info()["disaggregation"]["bootstrap_port"]

    def prefill(self, prompt: list[int], room: int) -> Future[httpx.Response]:
        return self._ask(self._pair.prefill, prompt, room)

    def decode(self, prompt: list[int], room: int) -> Future[httpx.Response]:
        return self._ask(self._pair.decode, prompt, room)

    def _ask(self, server: Launched, prompt: list[int], room: int) -> Future[httpx.Response]:
        where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self._port, "bootstrap_room": room}
        return self._pool.submit(server.post, "/generate", {**body(prompt), **where})


@pytest.fixture
def legs(pair):
    with ThreadPoolExecutor() as pool:
        yield Legs(pair, pool)


def assert_no_text(leg: Future[httpx.Response], *statuses: int) -> None:
    response = leg.result()
    assert response.status_code in statuses, response.text
    assert "output_ids" not in response.text
    assert response.json()["error"]["message"]


def assert_right(legs: Legs, prompt: list[int], room: int, answer: list[int]) -> None:
    prefill, decode = legs.prefill(prompt, room), legs.decode(prompt, room)
    assert decode.result().json()["output_ids"] == answer
    assert prefill.result().status_code == 200


def test_a_room_that_was_not_opened(legs):
    assert_no_text(legs.decode(ONE, 1), 504)


@pytest.mark.parametrize("room", [-1, 1 << 63, 1.5, "1"])
def test_a_room_that_is_no_number_of_one(legs, room):
    assert_no_text(legs.decode(ONE, room), 400)
    assert_no_text(legs.prefill(ONE, room), 400)


def test_a_room_that_was_used_up(legs, answers):
    assert_right(legs, ONE, 2, answers[0])
    assert_no_text(legs.decode(ONE, 2), 503, 504)
    assert_right(legs, OTHER, 12, answers[1])


def test_a_room_that_has_another_prompt_by_now(legs, answers):
    assert_right(legs, ONE, 3, answers[0])
    prefill, decode = legs.prefill(OTHER, 3), legs.decode(ONE, 3)
    assert_no_text(decode, 409)
    assert_no_text(prefill, 409)
    assert_right(legs, ONE, 4, answers[0])


def test_a_room_that_was_given_up(legs, answers):
    assert_no_text(legs.prefill(ONE, 5), 504)
    assert_no_text(legs.decode(ONE, 5), 503, 504)
    assert_right(legs, ONE, 15, answers[0])


def test_the_room_of_an_earlier_life(pair, legs, answers):
    """A prefill that has started anew, at the same place, knows nothing of what it promised before."""
    promised = legs.prefill(ONE, 6)
    wait_until(lambda: pair.prefill.info()["disaggregation"]["sent"]["rooms"], 5, "the prefill's leg is there")
    pair.prefill.process.kill()
    with pytest.raises(httpx.HTTPError):
        promised.result()
    decode = legs.decode(ONE, 6)
    pair.prefill.process.wait()
    pair.prefill.start()
    pair.prefill.wait_healthy()
    assert_no_text(decode, 502, 503, 504)
    rooms = itertools.count(16)

    def right_again() -> bool:
        """Return whether a new room has the answer. The decode may still be looking for the new prefill."""
        room = next(rooms)
        prefill, decode = legs.prefill(ONE, room), legs.decode(ONE, room)
        done = [leg.result().status_code for leg in (prefill, decode)] == [200, 200]
        assert not done or decode.result().json()["output_ids"] == answers[0]
        return done

    wait_until(right_again, 20, "the decode has found the new prefill")
