"""What goes through the router and what doesn't: headers, bodies, paths, and how fast."""

import asyncio
import contextlib
import tracemalloc

import httpx
import pytest
from support.router_rig import DONE, EVENT, FLOOD_EVENT, FLOOD_EVENTS, LONG_EVENT, LONG_PART_BYTES, generate, scenario

from pdserve.router import answer_relay, dispatcher, leg
from pdserve.router.byte_budget import ByteBudget

MIB = 1 << 20


@pytest.mark.parametrize("status", [200, 418])
def test_headers_that_are_for_the_client_come_back(status):
    @scenario()
    async def run(rig):
        client = await rig.route(worker=[await rig.instance("headers")])
        response = await generate(client, status=status)
        assert response.status_code == status
        headers = {name.lower(): value for name, value in response.headers.raw}
        assert headers.pop(b"date") != b"x"  # the router's own
        assert headers.pop(b"content-length") == str(len(response.content)).encode()
        assert headers.pop(b"server", b"") != b"x"
        assert headers.pop(b"x-request-id") != "é".encode()  # the router's, as it names both legs
        assert headers == {
            b"content-type": b"application/json",
            b"x-accel-buffering": b"no",
            b"cache-control": b"private",
            b"retry-after": b"7",
            b"x-should-retry": b"false",
            b"x-pdserve-ignored": b"mirostat",
        }

    run()


@scenario()
async def test_a_stream_is_not_to_be_cached(rig):
    client = await rig.route(worker=[await rig.instance()])
    assert (await generate(client, stream=True)).headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("by_a_pair", [False, True])
def test_nesting_that_cant_be_read_is_refused_on_every_path(by_a_pair):
    @scenario()
    async def run(rig):
        one, other = await rig.instance(), await rig.instance()
        client = await (rig.route([one], [other]) if by_a_pair else rig.route(worker=[one, other]))
        for path in ("/generate", "/v1/completions", "/v1/chat/completions"):
            body = b'{"prompt": "x", "text": "x", "metadata": ' + b"[" * 2000 + b"]" * 2000 + b"}"
            response = await client.post(path, content=body)
            assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")
        assert one.requests == other.requests == []
        deep = b'{"text": "x", "metadata": ' + b"[" * 300 + b"]" * 300 + b"}"  # for the instances to judge
        assert (await client.post("/generate", content=deep)).status_code == 200

    run()


@scenario()
async def test_a_path_means_the_same_to_the_instance(rig):
    w = await rig.instance()
    client = await rig.route(worker=[w])
    for path in ("/generate%0A", "/v1/completions%0a", "/generate%00"):
        assert (await client.post(path, json={"text": "x"})).status_code == 404
    for path in ("/v1/models%0A", "/v1/models/%2e%2e/%2e%2e/flush_cache", "/v1/models/a%0D%0Ab"):
        response = await client.get(path)
        assert (response.status_code, response.json()["error"]["type"]) == (404, "invalid_request_error")
    assert w.requests == []
    assert {path for _, path, _ in w.questions} == {"/server_info"}  # the rig's own


@scenario()
async def test_a_question_may_be_asked_by_head(rig):
    w = await rig.instance()
    client = await rig.route(worker=[w])
    response = await client.head("/v1/models")
    assert (response.status_code, response.content) == (200, b"")
    assert ("GET", "/v1/models", b"") in w.questions


@pytest.mark.parametrize(("script", "streams"), [("flood", True), ("long", False)])
@pytest.mark.parametrize("held", [0, answer_relay.MAX_HELD_BYTES])
def test_a_slow_reader_holds_up_its_instance_alone(script, streams, held, monkeypatch):
    monkeypatch.setattr(answer_relay, "MAX_HELD_BYTES", held)

    @scenario()
    async def run(rig):
        w1, w2 = await rig.instance(script), await rig.instance()
        client = await rig.route(worker=[w1, w2])
        async with client.stream("POST", "/generate", json={"text": "x", "stream": streams}) as response:
            before, turns = -1, 0
            while turns < 200 and w1.flooded < FLOOD_EVENTS:
                turns = turns + 1 if w1.flooded == before else 0
                before = w1.flooded
                await asyncio.sleep(0)
            # What lies in sockets and buffers on the way, and no more.
            assert w1.flooded < FLOOD_EVENTS / 2
            assert (await generate(client)).json()["text"] == "ab"
            size = 0
            async for data in response.aiter_raw():
                size += len(data)
        assert size == FLOOD_EVENTS * len(FLOOD_EVENT)

    run()


@pytest.fixture
def budgets(monkeypatch):
    """The budgets of long events of the routers that the test starts."""
    made = []

    def make(limit):
        made.append(ByteBudget(limit))
        return made[-1]

    monkeypatch.setattr(answer_relay, "ByteBudget", make)
    return made


def test_long_events_of_clients_that_do_not_read_are_held_within_the_limit(budgets):
    @scenario(max_held_event_bytes=20 * MIB)
    async def run(rig):
        slow, fast = await rig.instance("long_event"), await rig.instance("long_event")
        client = await rig.route(worker=[slow, fast])
        [budget] = budgets
        client.timeout = None
        whole = EVENT + LONG_EVENT + DONE
        async with contextlib.AsyncExitStack() as answers:
            before_bytes, _ = tracemalloc.get_traced_memory()
            asked = [client.stream("POST", "/generate", json={"text": "x", "stream": True}) for _ in range(12)]
            responses = [await answers.enter_async_context(one) for one in asked]
            before, turns = -1, 0
            while turns < 500:
                flooded = slow.flooded + fast.flooded
                turns = turns + 1 if flooded == before else 0
                before = flooded
                await asyncio.sleep(0)
            held, _ = tracemalloc.get_traced_memory()
            assert 4 * MIB < budget.held < 20 * MIB + 12 * MIB // 2
            assert held - before_bytes < 48 * MIB, "of 96 MiB"
            # A client that reads gets its own all the same, and the others lose nothing.
            assert (await generate(client, stream=True)).content == whole
            for response in responses:
                assert await response.aread() == whole
        assert (budget.held, budget.of("")) == (0, 0)
        info = (await client.get("/server_info")).json()["instances"]
        assert [(i["failures"], i["state"]) for i in info] == [(0, "healthy")] * 2

    tracemalloc.start()
    try:
        run()
    finally:
        tracemalloc.stop()


async def read_into(found, parts):
    """Add all ``parts`` of a body to ``found``, as far as it comes."""
    async for part in parts:
        found.append(part)


@pytest.mark.parametrize(
    ("limit", "length"),
    [
        (64 * MIB, 4 * MIB),
        (0, 4 * MIB),
        (0, 2 * LONG_PART_BYTES),  # after the first part that is passed on
    ],
)
def test_a_stream_that_breaks_off_within_an_event_ends_with_an_error_if_the_event_was_held(budgets, limit, length):
    @scenario(max_held_event_bytes=limit)
    async def run(rig):
        instance = await rig.instance("long_event")
        client = await rig.route(worker=[instance])
        async with client.stream("POST", "/generate", json={"text": "x", "stream": True, "breaks": length}) as response:
            parts = response.aiter_raw()
            body = await anext(parts)
            if limit:
                while budgets[0].held < MIB:
                    await asyncio.sleep(0)
                instance.go_on.set()
                body += b"".join([part async for part in parts])
                assert body.startswith(EVENT + b'data: {"error"')
                assert body.endswith(DONE)
            else:
                while len(body) < len(EVENT) + min(MIB, length):
                    body += await anext(parts)
                instance.go_on.set()
                rest = []
                with pytest.raises(httpx.RemoteProtocolError, match="without sending complete"):
                    await read_into(rest, parts)
                assert (EVENT + LONG_EVENT).startswith(body + b"".join(rest))
        assert budgets[0].held == 0

    run()


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("by_a_pair", [False, True])
def test_an_instance_that_ends_an_answer_that_is_not_read_has_not_failed(by_a_pair, streams, monkeypatch):
    monkeypatch.setattr(leg, "LONG_PAUSE_SECONDS", 1e-6)

    @scenario(health_check_interval=60.0)
    async def run(rig):
        flood = await rig.instance("flood_and_leave")
        client = await (rig.route([await rig.instance()], [flood]) if by_a_pair else rig.route(worker=[flood]))
        # A second time, because the first death during a request has no consequence for it.
        for time in (1, 2):
            flood.flooded, before, turns = 0, -1, 0
            flood.go_on.clear()
            async with client.stream("POST", "/generate", json={"text": "x", "stream": streams}) as response:
                while turns < 200:
                    turns = turns + 1 if flood.flooded == before else 0
                    before = flood.flooded
                    await asyncio.sleep(0)
                assert flood.flooded < FLOOD_EVENTS / 2
                flood.go_on.set()
                if streams:
                    body = await response.aread()
                    assert b"client_too_slow" in body[-400:]
                    assert body.endswith(DONE)
                else:
                    with pytest.raises(httpx.RemoteProtocolError, match="without sending complete"):
                        await response.aread()
            assert len(flood.requests) == time
            info = (await client.get("/server_info")).json()["instances"]
            assert [(i["failures"], i["state"], i["resting_seconds"]) for i in info] == [(0, "healthy", 0)] * len(
                rig.instances
            )
        # Neither is the request suspected.
        flood.script = "ok"
        assert (await generate(client, stream=streams)).status_code == 200

    run()


@scenario()
async def test_a_long_answer_that_breaks_off_is_incomplete_at_the_client(rig):
    client = await rig.route(worker=[await rig.instance("long")])
    async with client.stream("POST", "/generate", json={"text": "x", "breaks": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-length"] == str(FLOOD_EVENTS * len(FLOOD_EVENT))
        with pytest.raises(httpx.RemoteProtocolError, match="without sending complete"):
            async for _ in response.aiter_raw():
                pass
    assert (await client.get("/livez")).status_code == 200


@pytest.mark.parametrize("streams", [False, True])
def test_a_prompt_whose_end_is_not_seen_counts_for_a_time(streams, monkeypatch):
    monkeypatch.setattr(dispatcher, "UNSEEN_SECONDS", 0.0)

    @scenario()
    async def run(rig):
        instance = await rig.instance("hang")
        client = await rig.route(worker=[instance])
        asked = asyncio.create_task(generate(client, stream=streams))
        while not instance.requests:
            await asyncio.sleep(0)

        async def counted():
            [one] = (await client.get("/server_info")).json()["instances"]
            assert one["in_flight"] == 1
            return one["prompt_tokens"]

        if streams:
            assert await counted()
        else:
            while await counted():
                pass
        asked.cancel()

    run()
