"""A client that goes away ends its requests: a real uvicorn on a free port, raw sockets, a fake engine."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from support.fake_engine import FakeEngine
from support.served_app import serving

from pdserve.messages.outputs import FinishType, TextBatch


async def send(port: int, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """POST ``body`` to /generate and read nothing."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = orjson.dumps(body)
    writer.write(b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after_text", [False, True])
def test_every_request_of_a_client_that_goes_is_aborted(stream: bool, after_text: bool) -> None:
    async def run() -> None:
        engine = FakeEngine(hold=True)
        async with serving(engine) as port:
            reader, writer = await send(port, {"text": ["a", "b"], "rid": ["x", "y"], "stream": stream})
            await engine.wait_for(lambda: len(engine.requests) == 2)
            if after_text:
                engine.client.dispatch([TextBatch([engine.text(engine.requests[0], "w0 ", [0])])])
                if stream:
                    assert b'"w0 "' in await reader.readuntil(b'"w0 "')
            writer.close()
            await engine.wait_for(lambda: len(engine.aborts) == 2)
            assert {abort.rid for abort in engine.aborts} == {"x", "y"}

    asyncio.run(run())


def test_a_name_can_be_used_again_before_the_engine_has_ended_its_first_owner() -> None:
    async def run() -> None:
        engine = FakeEngine(hold=True)
        engine.end_aborted = False
        async with serving(engine) as port:
            _, writer = await send(port, {"text": "a", "rid": "x"})
            await engine.wait_for(lambda: len(engine.requests) == 1)
            writer.close()
            await engine.wait_for(lambda: len(engine.aborts) == 1)
            reader, writer = await send(port, {"text": "b", "rid": "x"})
            await engine.wait_for(lambda: len(engine.requests) == 2)
            first, second = engine.requests
            assert second.rid != first.rid == "x"
            engine.client.dispatch([TextBatch([engine.text(first, "stale", [1], FinishType.ABORT)])])
            engine.client.dispatch([TextBatch([engine.text(second, "fresh", [2], FinishType.LENGTH)])])
            answer = orjson.loads((await reader.readuntil(b"}}}")).split(b"\r\n\r\n")[1])
            assert (answer["text"], answer["meta_info"]["id"]) == ("fresh", "x")
            assert len(engine.client.live) == 0
            writer.close()

    asyncio.run(run())


def test_a_client_that_goes_while_sending_does_no_harm() -> None:
    async def run() -> None:
        engine = FakeEngine()
        async with serving(engine) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b'POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{"text"')
            await writer.drain()
            writer.close()
            reader, writer = await send(port, {"text": "a", "sampling_params": {"max_new_tokens": 1}})
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            writer.close()

    asyncio.run(run())
