"""An API is added with one file and one entry: an instance and a router serve one that the test invents."""

from __future__ import annotations

import asyncio
import sys

import pytest
from support import invented_api
from support.fake_engine import FakeEngine, with_engine
from support.invented_api import FaultAnswer, SaidAnswer
from support.machine import limit
from support.router_rig import Rig, scenario

from pdserve.messages.outputs import ReqError, TextBatch
from pdserve.runtime.web import apis

SAID = b'event: said\ndata: {"said":"a"}\n\n'
OVER = b'event: over\ndata: {"why":"cut"}\n\n'
FAULT = b'event: fault\ndata: {"kind":"fault","error":{"message":"%s","param":null}}\n\n'


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apis, "PATHS", (*apis.PATHS, *invented_api.API))
    monkeypatch.setitem(sys.modules, "pdserve.server.http.parley", invented_api)


def test_an_instance_answers_whole_and_in_a_stream() -> None:
    async def run(engine: FakeEngine) -> None:
        body = {"prompt": "hi", "words": 2, "mood": "gay"}
        whole = await engine.post("/parley/say", body)
        assert SaidAnswer(**whole.json()) == SaidAnswer(said="w0 w1 ", why="cut")
        assert whole.headers["x-pdserve-ignored"] == "mood"
        assert engine.requests[0].rid.startswith("say-")
        stream = await engine.post("/parley/say", body | {"stream": True})
        parts = stream.text.split("\n\n")
        assert (parts[0], parts[-2:]) == ('event: said\ndata: {"said":"w0 "}', ['event: over\ndata: {"why":"cut"}', ""])
        assert (await engine.post("/parley/count", {"prompt": "a b c"})).json() == {"words": 3}
        assert (await engine.get("/parley/voices")).json() == {"voices": list(engine.options.model_names)}

    with_engine(run)


def test_an_instance_answers_errors_in_the_apis_shape() -> None:
    async def run(engine: FakeEngine) -> None:
        for response in (
            await engine.post("/parley/say", {"prompt": 5}),
            await engine.post("/parley/count", {}),
            await engine.get("/parley/say"),
        ):
            assert 400 <= response.status_code < 500
            FaultAnswer.model_validate(response.json())

    with_engine(run)


def test_an_instance_ends_a_stream_with_an_error() -> None:
    async def run(engine: FakeEngine) -> None:
        stream = asyncio.create_task(engine.post("/parley/say", {"prompt": "hi", "stream": True}))
        await engine.wait_for(lambda: bool(engine.requests))
        (request,) = engine.requests
        # Sent one by one, or the stream would begin with the error and be a status.
        engine.client.dispatch([TextBatch([engine.text(request, "a", [0])])])
        live = engine.client.live.get(request.rid)
        async with asyncio.timeout(limit(10)):
            while live is not None and not live.choice.opened:
                await asyncio.sleep(0)
        engine.client.dispatch([ReqError(request.rid, 500, "broke")])
        assert (await stream).content == SAID + FAULT % b"broke"

    with_engine(run, hold=True)


def test_the_openapi_page_shows_its_stream() -> None:
    async def run(engine: FakeEngine) -> None:
        page = (await engine.get("/openapi.json")).json()
        good = page["paths"]["/parley/say"]["post"]["responses"]["200"]
        assert good["description"] == 'With "stream": true, each event holds one of these.'
        (chunk,) = good["content"]["text/event-stream"]["schema"]["properties"]["data"]["anyOf"]
        assert chunk["contentSchema"] == {"$ref": "#/components/schemas/SaidEvent"}

    with_engine(run)


def test_a_router_passes_it_on_and_sees_its_errors() -> None:
    @scenario(retries=0)
    async def run(rig: Rig) -> None:
        worker = await rig.instance("pieces")
        client = await rig.route(worker=[worker])
        worker.go_on.set()
        body = {"prompt": "hi", "stream": True}
        worker.pieces = [SAID, OVER]
        assert (await client.post("/parley/say", json=body)).content.startswith(SAID + OVER)
        worker.pieces = [b": keep-alive\n\n" + FAULT % b"full"]
        first = await client.post("/parley/say", json=body)
        assert (first.status_code, first.json()) == (
            500,
            {"kind": "fault", "error": {"message": "full", "param": None}},
        )
        worker.script, worker.pieces = "say_and_leave", [SAID]
        late = await client.post("/parley/say", json=body)
        assert late.content.startswith(SAID + b"event: fault\ndata: ")
        FaultAnswer.model_validate_json(late.content.rpartition(b"data: ")[2])

    run()
