"""Errors that an HTTP front answers with keep nothing of the request that they ended."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest
from support.fake_engine import FakeEngine, with_engine
from support.router_rig import Rig, generate, scenario

from pdserve.messages.outputs import ReqError
from pdserve.router.client_answer import ClientAnswer
from pdserve.router.dispatcher import Dispatcher
from pdserve.router.request_body import RequestBody
from pdserve.router.routed_request import RoutedRequest
from pdserve.runtime.web.errors import without_frames
from pdserve.server.http.engine.submission import Submission
from pdserve.server.http.generation import engine_response


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


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [("bad_request", "bad_request"), ("bad_request", "hang"), ("hang", "bad_request"), ("hang", "ok"), ("die", "hang")],
)
def test_a_pair_that_fails_leaves_no_body_for_the_collector(
    monkeypatch: pytest.MonkeyPatch, prefill: str, decode: str
) -> None:
    """Neither the leg that failed nor the one that was dropped for it."""
    kept: list[weakref.ref[RequestBody]] = []
    serve = Dispatcher.serve

    async def noted(dispatcher: Dispatcher, request: RoutedRequest, answer: ClientAnswer) -> None:
        kept.append(weakref.ref(request.body))
        await serve(dispatcher, request, answer)

    monkeypatch.setattr(Dispatcher, "serve", noted)

    @scenario(retries=0)
    async def run(rig: Rig) -> None:
        legs = [await rig.instance(prefill), await rig.instance(decode)]
        await generate(await rig.route(prefill=legs[:1], decode=legs[1:]))

    run()
    assert [ref() for ref in kept] == [None]
