"""The router's ``/metrics``, its targets for Prometheus, and the ids that it gives requests on their way."""

from __future__ import annotations

import asyncio
import logging

import pytest
from support.router_rig import EVENT, Rig, generate, scenario
from support.scrape import Page


async def scrape(rig: Rig) -> Page:
    answer = await rig.client.get("/metrics")
    assert answer.status_code == 200
    return Page(answer.text)


@scenario()
async def test_answers_bytes_and_times_are_counted(rig):
    p, d = await rig.instance(), await rig.instance()
    client = await rig.route([p], [d])
    whole, streamed = await generate(client), await generate(client, stream=True)
    assert (await client.post("/generate", content=b"{")).status_code == 400
    assert (await client.get("/made/up")).status_code == 404
    page = await scrape(rig)
    assert page.total("pdserve_router_responses_total", path="/generate", status="200") == 2
    assert page.total("pdserve_router_responses_total", path="/generate", status="400") == 1
    assert page.total("pdserve_router_responses_total", path="other", status="404") == 1
    assert page.total("pdserve_router_relayed_bytes_total") == len(whole.content) + len(streamed.content)
    assert page.total("pdserve_router_request_duration_seconds_count") == 2
    assert page.total("pdserve_router_time_to_first_token_seconds_count") == 1
    assert page.total("pdserve_router_pick_duration_seconds_count") == 2
    assert 0 < page.total("pdserve_router_pick_duration_seconds_sum") < 1
    assert page.total("pdserve_router_retries_total") == 0
    for leg in ("prefill", "decode"):
        assert page.total("pdserve_router_instance_requests_total", leg=leg) == 2
        assert page.total("pdserve_router_instance_in_flight", leg=leg) == 0
        assert page.total("pdserve_router_instance_healthy", leg=leg) == 1


@scenario()
async def test_retries_and_failures_are_counted_by_leg(rig):
    p, d, other = await rig.instance(), await rig.instance("die"), await rig.instance()
    client = await rig.route([p], [d, other])
    assert (await generate(client)).status_code == 200
    busy = await rig.instance("busy")
    page = await scrape(rig)
    assert page.total("pdserve_router_retries_total", status="502") == 1
    assert page.total("pdserve_router_retries_total", status="503") == 0
    assert page.total("pdserve_router_instance_failures_total", url=d.url, leg="decode") == 1
    assert page.total("pdserve_router_instance_failures_total", leg="prefill") == 0
    assert page.total("pdserve_router_responses_total", path="/generate", status="200") == 1
    await d.kill()
    await rig.until_states("healthy", "unhealthy", "healthy")
    assert (await scrape(rig)).total("pdserve_router_instance_healthy", url=d.url) == 0
    assert busy.requests == []


@scenario()
async def test_a_request_under_way_is_in_flight(rig):
    w = await rig.instance("die_mid_stream")
    client = await rig.route(worker=[w])
    async with client.stream("POST", "/generate", json={"text": "x", "stream": True}) as answer:
        assert await anext(answer.aiter_bytes()) == EVENT
        page = await scrape(rig)
        assert page.total("pdserve_router_instance_in_flight", leg="worker") == 1
        assert page.total("pdserve_router_requests_in_flight") == 2  # it and the scrape
        w.go_on.set()


@scenario()
async def test_targets_are_what_prometheus_discovers(rig):
    p, d = await rig.instance(), await rig.instance()
    client = await rig.route([p], [d])
    assert (await client.get("/metrics/targets")).json() == [
        {"targets": [f"127.0.0.1:{p.port}"], "labels": {"leg": "prefill", "__scheme__": "http"}},
        {"targets": [f"127.0.0.1:{d.port}"], "labels": {"leg": "decode", "__scheme__": "http"}},
    ]


@pytest.mark.parametrize(("is_open", "status"), [(False, 401), (True, 200)])
def test_metrics_need_the_key_unless_they_are_open(is_open, status):
    @scenario(api_key="secret", metrics_without_key=is_open)
    async def run(rig):
        client = await rig.route(worker=[await rig.instance()])
        assert (await client.get("/metrics")).status_code == status
        assert (await client.get("/metrics/targets")).status_code == status
        assert (await client.get("/server_info")).status_code == 401

    run()


@scenario()
async def test_both_legs_get_the_clients_id_and_a_name_of_their_own_that_holds_it(rig):
    p, d = await rig.instance(), await rig.instance()
    client = await rig.route([p], [d])
    for _ in range(2):
        answer = await client.post("/generate", json={"text": "x"}, headers={"x-request-id": "trace-1"})
        assert answer.headers["x-request-id"] == "trace-1"
    legs = p.requests + d.requests
    assert {leg.headers["x-request-id"] for leg in legs} == {"trace-1"}
    names = [leg.body["rid"] for leg in legs]
    assert all(name.startswith("trace-1-") for name in names)
    assert (names[:2], len(set(names))) == (names[2:], 2)  # the legs agree, and an id may come twice
    named = await client.post("/generate", json={"text": "x", "rid": "mine"})
    assert d.requests[-1].body["rid"] == "mine"
    assert named.headers["x-request-id"] == d.requests[-1].headers["x-request-id"]


@scenario()
async def test_an_id_is_drawn_where_there_is_none_or_an_unfit_one(rig):
    p, d = await rig.instance(), await rig.instance()
    client = await rig.route([p], [d])
    for given in ({}, {"x-request-id": "é".encode()}):
        answer = await client.post("/generate", json={"text": "x"}, headers=given)
        drawn = answer.headers["x-request-id"]
        assert len(drawn) == 32
        assert [leg.requests[-1].headers["x-request-id"] for leg in (p, d)] == [drawn] * 2
        assert d.requests[-1].body["rid"].startswith(drawn)
    lost = await client.post("/generate", content=b"{", headers={"x-request-id": "abc"})
    assert (lost.status_code, lost.headers["x-request-id"]) == (400, "abc")


def test_the_log_says_where_a_request_went_and_why_it_was_tried_again(caplog, monkeypatch):
    # In a process of its own the router's formatter does this.
    from pdserve.runtime.logs import rid_of

    seen = []
    monkeypatch.setattr(caplog.handler, "emit", lambda record: seen.append((record.getMessage(), rid_of(record))))

    @scenario()
    async def run(rig):
        p, d, other = await rig.instance(), await rig.instance("die"), await rig.instance()
        client = await rig.route([p], [d, other])
        await client.post("/generate", json={"text": "x"}, headers={"x-request-id": "trace-1"})
        pairs = [f"goes to prefill {p.url} and decode {decode.url}" for decode in (d, other)]
        # The line about the whole comes when the last byte has been sent; the client may have it before.
        while not any('"POST /generate" 200 ' in message for message, rid in seen if rid == "trace-1"):
            await asyncio.sleep(0)
        messages = [message for message, rid in seen if rid == "trace-1"]
        assert [message for message in messages if message.startswith("goes to")] == pairs
        assert any("trying again" in message for message in messages)

    with caplog.at_level(logging.DEBUG):
        run()
