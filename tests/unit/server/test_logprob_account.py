"""Log-probabilities of all running requests together: which request ends when there are too many."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from support.fake_engine import FakeEngine, with_engine

from pdserve.messages.outputs import TextBatch
from pdserve.server.http.engine import logprob_account
from pdserve.server.http.engine.logprob_account import LogprobAccount
from pdserve.server.http.errors import ApiError


class Answer:
    def __init__(self) -> None:
        self.logprobs = 0
        self.failure: ApiError | None = None

    @property
    def is_failed(self) -> bool:
        return self.failure is not None

    def fail(self, failure: ApiError) -> None:
        self.failure = failure


def failures(*answers: Answer) -> list[int | None]:
    return [answer.failure.status if answer.failure is not None else None for answer in answers]


def test_the_largest_ends_where_all_have_too_many() -> None:
    account = LogprobAccount(each=100, held=150)
    large, small, last = Answer(), Answer(), Answer()
    account.add(large, 90)
    account.add(small, 20)
    account.add(last, 40)
    assert failures(large, small, last) == [None, None, None]
    account.add(small, 1)
    assert failures(large, small, last) == [429, None, None]
    assert "151 log-probabilities, the limit is 150" in str(large.failure)
    assert "most of them (90)" in str(large.failure)
    # An ended request holds its own share until it is dropped, and no other request ends for it.
    account.add(last, 50)
    assert failures(large, small, last) == [429, None, None]
    assert account.held == 201
    account.drop(large)
    account.drop(large)
    assert account.held == 111


def test_one_request_has_a_limit_of_its_own_and_may_reach_it() -> None:
    account = LogprobAccount(each=100, held=50)
    one = Answer()
    account.add(one, 100)
    assert failures(one) == [None]
    account.add(one, 1)
    assert failures(one) == [413]


@pytest.mark.parametrize("stream", [False, True])
def test_the_largest_of_running_requests_is_a_429_and_nothing_of_it_is_left(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(logprob_account.LogprobAccount.__init__, "__defaults__", (None, 40))

    async def check(engine: FakeEngine) -> None:
        account = engine.client.logprobs
        engine.hold = True

        def post(top: int) -> asyncio.Task[httpx.Response]:
            scored = {"return_logprob": True, "top_logprobs_num": top, "logprob_start_len": 0}
            body = {"text": "x", "stream": stream, "sampling_params": {"max_new_tokens": 9}, **scored}
            return asyncio.ensure_future(engine.post("/generate", body))

        def arrived(count: int) -> Callable[[], bool]:
            return lambda: len(engine.requests) == count

        large = post(9)
        await engine.wait_for(arrived(1))
        small = post(0)
        await engine.wait_for(arrived(2))
        first, second = engine.requests
        # A prompt of two tokens, of which the first has no alternatives, and output of one token.
        engine.client.dispatch([_batch(engine, first, 0)])
        assert account.held == 21
        for i in range(8):
            engine.client.dispatch([_batch(engine, second, i)])
        engine.client.dispatch([_batch(engine, first, 1)])
        engine.step(second, 8)
        statuses = [(await large).status_code, (await small).status_code]
        if stream:
            assert statuses[1] == 200
            assert "429" in (await large).text
        else:
            assert statuses == [429, 200]
        await engine.wait_for(lambda: not len(engine.client.live))
        assert account.held == 0

    with_engine(check, max_logprobs_per_request=35)


def _batch(engine: FakeEngine, request: Any, i: int) -> TextBatch:
    return TextBatch([engine.text(request, f"w{i} ", [i])])
