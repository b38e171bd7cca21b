"""How the router serves a request: both legs or neither, retries, streams, clients that leave."""

import asyncio
import json

from support.router_rig import DONE, EVENT, generate, scenario


@scenario()
async def test_both_legs_get_the_same_room_and_rid(rig):
    p, d = await rig.instance(), await rig.instance()
    client = await rig.route([p], [d])
    answer = (await generate(client, sampling_params={"temperature": 0.1})).json()
    again = (await generate(client)).json()
    sent_p, sent_d = p.requests[0].body, d.requests[0].body
    assert answer == {"text": "ab", "seen": sent_d}
    assert (sent_p.pop("bootstrap_leg"), sent_d.pop("bootstrap_leg")) == ("prefill", "decode")
    assert (
        sent_p
        == sent_d
        == {
            "text": "x",
            "stream": False,
            "sampling_params": {"temperature": 0.1},
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": 9001,
            "bootstrap_room": sent_d["bootstrap_room"],
            "rid": sent_d["rid"],
        }
    )
    assert 0 < sent_d["bootstrap_room"] < 2**63
    assert again["seen"]["bootstrap_room"] != sent_d["bootstrap_room"]
    assert again["seen"]["rid"] != sent_d["rid"]


@scenario()
async def test_a_stream_passes_through_unchanged(rig):
    p, d = await rig.instance(), await rig.instance()
    client = await rig.route([p], [d])
    response = await generate(client, stream=True, rid="mine")
    assert response.headers["content-type"] == "text/event-stream"
    assert response.content == EVENT + EVENT + DONE
    assert (p.requests[0].body["stream"], d.requests[0].body["stream"]) == (False, True)
    assert p.requests[0].body["rid"] == d.requests[0].body["rid"] == "mine"


@scenario()
async def test_a_clients_bootstrap_host_reaches_no_instance_on_any_path(rig):
    p, d, w = await rig.instance(), await rig.instance(), await rig.instance(health=503)
    client = await rig.route([p], [d], [w])
    named = {"bootstrap_host": "evil", "bootstrap_port": 1, "bootstrap_room": 5}
    await generate(client, text="y", **named)  # the pair
    await p.kill()
    w.health = 200
    await rig.until_states("unhealthy", "healthy", "healthy")
    for path in ("/generate", "/v1/completions"):  # the worker alone
        await client.post(path, json={"text": "z", "prompt": "z", **named})
    assert [seen.body["text"] for seen in d.requests] == ["y"]
    assert [seen.path for seen in w.requests] == ["/generate", "/v1/completions"]
    for seen in w.requests:
        assert not [name for name in seen.body if name.startswith("bootstrap_")]
    assert all("evil" not in str(seen.body) for seen in p.requests + d.requests)


@scenario()
async def test_bad_json_touches_no_instance(rig):
    p, d = await rig.instance(), await rig.instance()
    client = await rig.route([p], [d])
    for body in (b"{", b"[1]", b" ", b'{"text": NaN}'):
        response = await client.post("/generate", content=body)
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"
    assert p.requests == d.requests == []


@scenario(max_body_bytes=1000)
async def test_a_long_body_is_refused(rig):
    w = await rig.instance()
    client = await rig.route(worker=[w])
    assert (await generate(client, pad="x" * 1000)).status_code == 413
    assert w.requests == []


@scenario()
async def test_a_leg_that_refuses_drops_the_other(rig):
    bad, hang = await rig.instance("bad_request"), await rig.instance("hang")
    client = await rig.route([bad], [hang])
    response = await generate(client, stream=True)
    assert (response.status_code, response.json()["error"]["message"]) == (400, "temperature: too hot")
    assert len(hang.requests) <= 1
    for seen in hang.requests:
        await seen.dropped.wait()
    assert len(bad.requests) == 1


@scenario()
async def test_a_decode_that_refuses_drops_the_prefill(rig):
    hang, bad = await rig.instance("hang"), await rig.instance("bad_request")
    client = await rig.route([hang], [bad])
    response = await generate(client)
    assert (response.status_code, response.json()["error"]["message"]) == (400, "temperature: too hot")
    for seen in hang.requests:
        await seen.dropped.wait()
    assert len(bad.requests) == 1


@scenario()
async def test_an_answer_that_is_not_in_the_error_shape_is_wrapped(rig):
    w = await rig.instance("crash_text")
    client = await rig.route(worker=[w])
    response = await generate(client)
    assert response.status_code == 500
    assert w.url in response.json()["error"]["message"]
    assert len(w.requests) == 1


@scenario()
async def test_a_dead_pair_is_retried_on_another_with_a_fresh_room(rig):
    p1, d1, p2, d2 = await rig.instance(), await rig.instance("die"), await rig.instance(), await rig.instance()
    client = await rig.route([p1, p2], [d1, d2])
    response = await generate(client, rid="mine")
    assert response.json()["text"] == "ab"
    assert d1.requests[0].body["bootstrap_room"] != d2.requests[0].body["bootstrap_room"]
    assert d1.requests[0].body["rid"] == d2.requests[0].body["rid"] == "mine"


@scenario()
async def test_a_retry_avoids_who_failed(rig):
    p, d, w = await rig.instance(), await rig.instance("busy"), await rig.instance()
    client = await rig.route([p], [d], [w])
    assert (await generate(client)).status_code == 200
    assert (len(p.requests), len(d.requests), len(w.requests)) == (1, 1, 1)


@scenario()
async def test_a_failed_prefill_is_retried_while_the_decode_waits(rig):
    p1, d1, p2, d2 = await rig.instance("busy"), await rig.instance("hang"), await rig.instance(), await rig.instance()
    client = await rig.route([p1, p2], [d1, d2])
    assert (await generate(client, stream=True)).content == EVENT + EVENT + DONE
    for seen in d1.requests:
        await seen.dropped.wait()


@scenario()
async def test_an_error_as_first_event_is_still_a_status_or_a_retry(rig):
    p, d = await rig.instance(), await rig.instance("error_event")
    client = await rig.route([p], [d])
    response = await generate(client, stream=True)
    assert (response.status_code, response.json()["error"]["message"]) == (502, "the transfer failed")
    assert len(d.requests) == 3


@scenario(retries=1)
async def test_retries_are_bounded_and_the_last_error_is_returned(rig):
    w = await rig.instance("draining")
    client = await rig.route(worker=[w])
    response = await generate(client)
    assert (response.status_code, response.json()["error"]["message"]) == (503, "draining")
    assert len(w.requests) == 2


@scenario(retry_window=0.3)
async def test_an_instance_that_dies_gives_an_error_not_a_hang(rig):
    w = await rig.instance("hang")
    client = await rig.route(worker=[w])
    request = asyncio.create_task(generate(client))
    await w.arrived.wait()
    await w.kill()
    response = await request
    assert response.status_code == 502
    assert "closed the connection" in response.json()["error"]["message"]
    await rig.until_states("unhealthy")
    refused = await generate(client)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert (await client.get("/health")).status_code == 503


@scenario(retry_window=5.0)
async def test_a_request_survives_the_restart_of_its_instance(rig):
    w = await rig.instance("hang")
    client = await rig.route(worker=[w])
    request = asyncio.create_task(generate(client))
    await w.arrived.wait()
    await w.kill()
    await rig.until_states("unhealthy")
    w.script = "ok"
    await w.start()
    assert (await request).json()["text"] == "ab"


@scenario()
async def test_death_in_mid_stream_ends_the_stream_with_an_error_event(rig):
    p, d = await rig.instance("hang"), await rig.instance("die_mid_stream")
    client = await rig.route([p], [d])
    async with client.stream("POST", "/generate", json={"text": "x", "stream": True}) as response:
        chunks = response.aiter_raw()
        assert await anext(chunks) == EVENT
        d.go_on.set()
        rest = b"".join([chunk async for chunk in chunks])
    error, done, end = rest.split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    assert "closed the connection" in json.loads(error.removeprefix(b"data: "))["error"]["message"]
    await p.requests[0].dropped.wait()
    assert len(d.requests) == 1


@scenario()
async def test_a_prefill_that_dies_after_the_first_token_does_no_harm(rig):
    p, d = await rig.instance("hang"), await rig.instance("stream_then_hang")
    client = await rig.route([p], [d])
    async with client.stream("POST", "/generate", json={"text": "x", "stream": True}) as response:
        chunks = response.aiter_raw()
        assert await anext(chunks) == EVENT
        await p.kill()
        await rig.until_states("unhealthy", "healthy")
        assert not d.requests[0].dropped.is_set()


@scenario()
async def test_a_client_that_leaves_before_the_first_byte_drops_both_legs(rig):
    p, d = await rig.instance("hang"), await rig.instance("hang")
    client = await rig.route([p], [d])
    request = asyncio.create_task(generate(client))
    await p.arrived.wait()
    await d.arrived.wait()
    request.cancel()
    await p.requests[0].dropped.wait()
    await d.requests[0].dropped.wait()
    info = await rig.until_states("healthy", "healthy")
    assert [i["in_flight"] for i in info["instances"]] == [0, 0]


@scenario()
async def test_a_client_that_leaves_in_mid_stream_drops_both_legs(rig):
    p, d = await rig.instance("hang"), await rig.instance("stream_then_hang")
    client = await rig.route([p], [d])
    async with client.stream("POST", "/generate", json={"text": "x", "stream": True}) as response:
        chunks = response.aiter_raw()
        assert await anext(chunks) == EVENT
        info = await rig.until_states("healthy", "healthy")
        assert [i["in_flight"] for i in info["instances"]] == [1, 1]
    await p.requests[0].dropped.wait()
    await d.requests[0].dropped.wait()


@scenario()
async def test_an_unhealthy_leg_keeps_work_from_its_partner(rig):
    p, d, w = await rig.instance(), await rig.instance(health=503), await rig.instance()
    client = await rig.route([p], [d], [w])
    assert (await generate(client)).status_code == 200
    assert (len(p.requests), len(w.requests)) == (0, 1)
    assert "bootstrap_room" not in w.requests[0].body
    d.health = 200
    await rig.until_states("healthy", "healthy", "healthy")
    assert (await generate(client)).status_code == 200
    assert (len(p.requests), len(d.requests), len(w.requests)) == (1, 1, 1)


@scenario()
async def test_a_dead_instance_is_skipped_and_comes_back(rig):
    w1, w2 = await rig.instance(), await rig.instance()
    client = await rig.route(worker=[w1, w2])
    await w1.kill()
    await rig.until_states("unhealthy", "healthy")
    for _ in range(3):
        assert (await generate(client)).status_code == 200
    assert (len(w1.requests), len(w2.requests)) == (0, 3)
    await w1.start()
    await rig.until_states("healthy", "healthy")
    for _ in range(2):
        assert (await generate(client)).status_code == 200
    assert (len(w1.requests), len(w2.requests)) == (1, 4)


@scenario(retry_window=0.0)
async def test_a_request_is_tried_elsewhere_however_late_its_instance_dies(rig):
    w1, w2 = await rig.instance("hang"), await rig.instance()
    client = await rig.route(worker=[w1, w2])
    request = asyncio.create_task(generate(client))
    await w1.arrived.wait()
    await w1.kill()
    assert (await request).status_code == 200
    assert len(w2.requests) == 1


@scenario()
async def test_a_stream_that_was_only_kept_alive_is_tried_elsewhere(rig):
    dying, other = await rig.instance("wait_and_die"), await rig.instance()
    client = await rig.route(worker=[dying, other])
    async with client.stream("POST", "/generate", json={"text": "x", "stream": True}) as response:
        chunks = response.aiter_raw()
        assert await anext(chunks) == b": keep-alive\n\n"
        dying.go_on.set()
        rest = b"".join([chunk async for chunk in chunks])
    assert response.status_code == 200
    assert EVENT in rest
    assert (len(dying.requests), len(other.requests)) == (1, 1)
