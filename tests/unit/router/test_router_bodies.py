"""What the router holds of requests' bodies: each once, all together up to a limit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import tracemalloc

import pytest
from support.router_rig import generate, scenario

from pdserve.router.client_bodies import LARGE_BYTES, SMALL_BYTES, ClientBodies
from pdserve.router.errors import TooManyBodiesError
from pdserve.router.instance import Instance, Role
from pdserve.router.request_body import RequestBody

MIB = 1 << 20
PREFILL = Instance("http://127.0.0.1:1", Role.PREFILL, 9001)


def held_by_the_router() -> int:
    """Return the bytes in blocks of half a MiB and more that the router's own code has allocated and not freed."""
    ours = [tracemalloc.Filter(True, f"*/{folder}/*.py") for folder in ("router", "runtime/web", "runtime/web/client")]
    traces = tracemalloc.take_snapshot().filter_traces(ours).traces
    return sum(trace.size for trace in traces if trace.size > MIB // 2)


def test_both_legs_share_the_clients_bytes():
    body = RequestBody.parse(json.dumps({"text": "x" * MIB}).encode())
    tracemalloc.start()
    bodies = body.for_pair(PREFILL)
    added, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert added < 64 << 10
    for pieces in bodies:
        assert json.loads(b"".join(pieces))["text"] == "x" * MIB


@pytest.mark.parametrize("fields", [{}, {"bootstrap_host": "written anew without it"}])
@pytest.mark.parametrize("by_a_pair", [True, False])
def test_a_stream_holds_its_body_once(by_a_pair, fields):
    @scenario()
    async def run(rig):
        first, second = await rig.instance("stream_then_hang"), await rig.instance("stream_then_hang")
        client = await (rig.route([first], [second]) if by_a_pair else rig.route(worker=[first, second]))
        prompt = "x" * 4 * MIB
        tracemalloc.start()
        try:
            async with client.stream("POST", "/generate", json={"text": prompt, "stream": True, **fields}) as response:
                await anext(response.aiter_raw())
                # What is written anew may be in a block half as long again.
                assert held_by_the_router() < 1.75 * len(prompt)
        finally:
            tracemalloc.stop()

    run()


@scenario()
async def test_large_bodies_are_parsed_on_a_thread(rig):
    client = await rig.route(worker=[await rig.instance()])
    threads: list[str] = []
    parse = RequestBody.parse

    def watched(*args, **more):
        threads.append(threading.current_thread().name)
        return parse(*args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RequestBody, "parse", watched)
        for path in ("/generate", "/kv/restore"):
            for size in (LARGE_BYTES // 2, LARGE_BYTES):
                assert (await client.post(path, json={"text": "x" * size})).status_code == 200
    assert [name.startswith("large-bodies") for name in threads] == [False, True, False, True]


def test_held_bytes_are_limited_and_small_bodies_have_a_reserve():
    bodies = ClientBodies(MIB, 2 * MIB)
    with bodies.hold(MIB, ""), bodies.hold(MIB, ""):
        assert bodies.budget.held == 2 * MIB
        with pytest.raises(TooManyBodiesError, match="2097152 bytes of bodies"), bodies.hold(SMALL_BYTES + 1, ""):
            raise AssertionError("it was let in")
        with contextlib.ExitStack() as small:
            for _ in range(4):
                small.enter_context(bodies.hold(SMALL_BYTES, ""))
            with pytest.raises(TooManyBodiesError):
                small.enter_context(bodies.hold(1, ""))
    assert bodies.budget.held == 0


def test_a_key_can_hold_as_many_bytes_of_bodies_as_it_leaves_free():
    bodies = ClientBodies(8 * MIB, 8 * MIB)
    with bodies.hold(8 * MIB, "greedy"):
        assert bodies.budget.held == 8 * MIB, "one body is always let in"
    with contextlib.ExitStack() as held:
        for _ in range(4):
            held.enter_context(bodies.hold(MIB, "greedy"))
        for size in (SMALL_BYTES + 1, MIB):
            with pytest.raises(TooManyBodiesError, match="4194304 of them this API key's"), bodies.hold(size, "greedy"):
                raise AssertionError("it was let in")
        held.enter_context(bodies.hold(4 * MIB, "other"))
    with contextlib.ExitStack() as held:
        for _ in range(8):
            held.enter_context(bodies.hold(MIB, ""))
    assert (bodies.budget.held, bodies.budget._of) == (0, {})


@scenario(max_body_bytes=MIB, max_held_body_bytes=MIB)
async def test_a_body_too_many_is_a_503_until_another_request_is_over(rig):
    w = await rig.instance("hang")
    client = await rig.route(worker=[w])
    first = asyncio.create_task(generate(client, text="x" * (MIB - 1000)))
    await w.arrived.wait()
    for path in ("/generate", "/tokenize", "/kv/snapshot"):
        refused = await client.post(path, json={"text": "x" * SMALL_BYTES})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert refused.headers["retry-after"] == "1"
    assert (len(w.requests), [path for _, path, _ in w.questions if path != "/server_info"]) == (1, [])
    w.script = "ok"
    assert (await generate(client)).status_code == 200
    first.cancel()
    await w.requests[0].dropped.wait()
    while (await generate(client, text="x" * SMALL_BYTES)).status_code != 200:
        await asyncio.sleep(0)
