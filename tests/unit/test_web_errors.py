"""Errors that an HTTP front answers with keep nothing of the request that they ended."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest
from support.fake_engine import FakeEngine, with_engine

from pdserve.messages.outputs import ReqError
from pdserve.runtime.web.errors import without_frames
from pdserve.server.http import engine_response
from pdserve.server.http.submission import Submission


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Body:
    """As large as one likes."""


def test_an_error_is_cut_from_the_frames_that_lead_back_to_it() -> None:
    kept: list[weakref.ref[Body]] = []

    async def fail(body: Body) -> None:
        try:
            raise KeyError("inside")
        except KeyError as e:
            raise ValueError("outside") from e

    async def serve() -> None:
        body = Body()
        kept.append(weakref.ref(body))
        task = asyncio.create_task(fail(body))  # the frame has the task, the task the error, the error the frame
        await task

    async def answer() -> None:
        try:
            await serve()
        except ValueError as e:
            without_frames(e)

    asyncio.run(answer())
    assert kept[0]() is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_request_leaves_nothing_for_the_collector(monkeypatch: pytest.MonkeyPatch, *, stream: bool) -> None:
    kept: list[weakref.ref[Submission]] = []
    close = Submission.close

    def noted(submission: Submission) -> None:
        kept.append(weakref.ref(submission))
        close(submission)

    monkeypatch.setattr(engine_response.Submission, "close", noted)

    async def run(engine: FakeEngine) -> None:
        engine.errors.append(ReqError("", 400, "too long", "invalid_request_error"))
        assert (await engine.post("/generate", {"text": "a", "stream": stream})).status_code == 400

    with_engine(run)
    assert [ref() for ref in kept] == [None]
