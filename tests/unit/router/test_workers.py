"""``/workers`` at a router: instances are added, cordoned, drained and removed while it serves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.router_rig import EVENT, Rig, generate, scenario
from support.scrape import Page

from pdserve.runtime.web.client import pool

KEY = "secret"
ADMIN = {"authorization": f"Bearer {KEY}"}


async def route(rig: Rig, **instances: Any) -> httpx.AsyncClient:
    client = await rig.route(**instances)
    client.headers.update(ADMIN)
    return client


async def listed(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    answer = await client.get("/workers")
    assert answer.status_code == 200, answer.text
    return answer.json()["workers"]


async def states(client: httpx.AsyncClient) -> dict[str, str]:
    return {worker["url"]: worker["state"] for worker in await listed(client)}


async def until(client: httpx.AsyncClient, wanted: dict[str, str]) -> None:
    """Wait until the members and their states are those ``wanted``."""
    while await states(client) != wanted:
        await asyncio.sleep(0)


async def change(client: httpx.AsyncClient, instance: Any, state: str) -> dict[str, Any]:
    answer = await client.patch("/workers", params={"url": instance.url}, json={"state": state})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def delete(client: httpx.AsyncClient, instance: Any, **more: str) -> tuple[int, str]:
    answer = await client.delete("/workers", params={"url": instance.url, **more})
    return answer.status_code, answer.json()["state"]


@scenario(api_key=KEY)
async def test_a_router_starts_empty_and_learns_the_roles_of_those_that_are_added(rig: Rig) -> None:
    p, d = await rig.instance(), await rig.instance()
    p.health_report = {"epoch": "e1", "role": "prefill", "bootstrap_port": 9001}
    d.health_report = {"epoch": "e2", "role": "decode"}
    client = await route(rig)
    for answer in (await generate(client), await client.get("/health"), await client.post("/tokenize", json={})):
        assert answer.status_code == 503
        assert (
            "this router has no instances; they join by POST /workers or --members-file"
            in answer.json()["error"]["message"]
        )
    for instance in (p, d):
        added = await client.post("/workers", json={"url": instance.url + "/"})
        assert added.status_code == 201
        assert added.json() == {
            **{"url": instance.url, "role": "worker", "bootstrap_port": None, "state": "joining"},
            **{"health": "unknown", "reason": "not checked yet", "in_flight": 0, "epoch": None, "source": "api"},
        }
    await until(client, {p.url: "ready", d.url: "ready"})
    assert (await generate(client)).status_code == 200
    assert (len(p.requests), len(d.requests)) == (1, 1)
    assert d.requests[0].body["bootstrap_port"] == 9001
    prefill, decode = await listed(client)
    assert prefill.items() >= {"role": "prefill", "epoch": "e1", "bootstrap_port": 9001, "health": "healthy"}.items()
    assert decode.items() >= {"role": "decode", "epoch": "e2", "bootstrap_port": None, "source": "api"}.items()


@scenario(api_key=KEY)
async def test_a_role_and_a_bootstrap_port_can_be_given(rig: Rig) -> None:
    p, d = await rig.instance(), await rig.instance()
    client = await route(rig)
    await client.post("/workers", json={"url": p.url, "role": "prefill", "bootstrap_port": 9007})
    await client.post("/workers", json={"url": d.url, "role": "decode"})
    await until(client, {p.url: "ready", d.url: "ready"})
    assert (await generate(client)).status_code == 200
    assert d.requests[0].body["bootstrap_port"] == 9007


@scenario(api_key=KEY)
async def test_an_address_without_an_instance_stays_out(rig: Rig) -> None:
    w, dead = await rig.instance(), await rig.instance()
    await dead.kill()
    client = await route(rig, worker=[w])
    assert (await client.post("/workers", json={"url": dead.url})).status_code == 201
    await rig.until_states("healthy", "unhealthy")
    assert await states(client) == {w.url: "ready", dead.url: "joining"}
    assert [(await generate(client)).status_code for _ in range(4)] == [200] * 4
    await dead.start()
    await until(client, {w.url: "ready", dead.url: "ready"})


@scenario(api_key=KEY)
async def test_a_cordoned_instance_finishes_its_requests_and_gets_no_new_ones(rig: Rig) -> None:
    stays, other = await rig.instance("pieces"), await rig.instance()
    stays.pieces = [EVENT]
    client = await route(rig, worker=[stays])
    running = asyncio.create_task(generate(client, stream=True))
    await stays.arrived.wait()
    await client.post("/workers", json={"url": other.url})
    await rig.until_states("healthy", "healthy")
    assert await change(client, stays, "cordoned") == next(w for w in await listed(client) if w["url"] == stays.url)
    assert [(await generate(client)).status_code for _ in range(4)] == [200] * 4
    assert (len(stays.requests), len(other.requests)) == (1, 4)
    # What any instance can answer is asked of the others first.
    assert (await client.post("/tokenize", json={"prompt": "a"})).json()["from"] == other.port
    stays.go_on.set()
    assert (await running).status_code == 200
    assert (await change(client, stays, "ready"))["state"] == "ready"
    await change(client, other, "cordoned")
    assert (await generate(client, stream=True)).status_code == 200
    assert len(stays.requests) == 2


@scenario(api_key=KEY)
async def test_a_fleet_that_is_cordoned_says_so_and_still_has_its_sessions(rig: Rig) -> None:
    w = await rig.instance()
    w.answers["/kv/sessions"] = (200, {"sessions": [{"owner": "", "name": "s"}]})
    client = await route(rig, worker=[w])
    await change(client, w, "cordoned")
    refused = await generate(client)
    assert refused.status_code == 503
    assert "(1 cordoned or draining)" in refused.json()["error"]["message"]
    assert (await client.get("/health")).status_code == 503
    assert (await client.get("/kv/sessions")).json()["sessions"][0]["instances"] == [w.url]
    assert (await client.post("/kv/restore", json={"name": "s"})).json()["from"] == w.port
    assert (await client.post("/tokenize", json={"prompt": "a"})).json()["from"] == w.port


@scenario(api_key=KEY)
async def test_an_idle_instance_is_drained_at_once_and_leaves_no_trace(rig: Rig) -> None:
    w, other = await rig.instance(), await rig.instance()
    client = await route(rig, worker=[w, other])
    assert {(await generate(client)).status_code for _ in range(4)} == {200}
    assert await delete(client, w) == (200, "gone")
    assert await states(client) == {other.url: "ready"}
    page = Page((await client.get("/metrics")).text)
    assert page.total("pdserve_router_instances", state="ready") == 1
    assert w.url not in (await client.get("/metrics")).text
    assert [t["targets"] for t in (await client.get("/metrics/targets")).json()] == [[f"127.0.0.1:{other.port}"]]
    assert (await client.delete("/workers", params={"url": w.url})).status_code == 404
    before = len(w.requests)
    assert [(await generate(client)).status_code for _ in range(4)] == [200] * 4
    assert len(w.requests) == before
    # It can come back, as a new member.
    assert (await client.post("/workers", json={"url": w.url})).json()["state"] == "joining"
    await until(client, {other.url: "ready", w.url: "ready"})


@scenario(api_key=KEY)
async def test_a_drain_waits_for_the_running_requests(rig: Rig) -> None:
    w, other = await rig.instance("pieces"), await rig.instance()
    w.pieces = [EVENT]
    client = await route(rig, worker=[w])
    running = asyncio.create_task(generate(client, stream=True))
    await w.arrived.wait()
    await client.post("/workers", json={"url": other.url})
    await until(client, {w.url: "ready", other.url: "ready"})
    assert await delete(client, w) == (202, "draining")
    assert await delete(client, w) == (202, "draining")
    assert (await client.post("/workers", json={"url": w.url})).status_code == 409
    assert [(await generate(client)).status_code for _ in range(4)] == [200] * 4
    assert len(w.requests) == 1
    w.go_on.set()
    assert b"[DONE]" in (await running).content
    await until(client, {other.url: "ready"})


@scenario(api_key=KEY)
async def test_a_drain_can_be_taken_back(rig: Rig) -> None:
    w = await rig.instance("pieces")
    w.pieces = [EVENT]
    client = await route(rig, worker=[w])
    running = asyncio.create_task(generate(client, stream=True))
    await w.arrived.wait()
    assert await delete(client, w) == (202, "draining")
    await change(client, w, "ready")
    w.go_on.set()
    assert (await running).status_code == 200
    assert (await generate(client, stream=True)).status_code == 200
    assert await states(client) == {w.url: "ready"}


@scenario(api_key=KEY)
async def test_what_was_not_answered_when_its_instance_was_removed_is_tried_elsewhere(rig: Rig) -> None:
    """Also after two removals. They say nothing about the request, which is not suspected of crashing instances."""
    hanging = [await rig.instance("hang"), await rig.instance("hang")]
    last = await rig.instance()
    client = await route(rig, worker=[hanging[0]])
    running = asyncio.create_task(generate(client))
    for now, following in zip(hanging, [hanging[1], last], strict=True):
        await now.arrived.wait()
        await client.post("/workers", json={"url": following.url})
        await until(client, {now.url: "ready", following.url: "ready"})
        assert await delete(client, now, drain="false") == (200, "gone")
        await now.requests[0].dropped.wait()
    assert (await running).status_code == 200
    assert len(last.requests) == 1
    assert (await generate(client)).status_code == 200


@scenario(api_key=KEY)
async def test_a_stream_that_had_begun_ends_with_an_error_when_its_instance_is_removed(rig: Rig) -> None:
    w = await rig.instance("stream_then_hang")
    client = await route(rig, worker=[w])
    async with client.stream("POST", "/generate", json={"text": "x", "stream": True}) as answer:
        parts = answer.aiter_bytes()
        assert await anext(parts) == EVENT
        assert await delete(client, w, drain="false") == (200, "gone")
        rest = b"".join([part async for part in parts])
    assert b"was removed from this router" in rest
    assert b'"status":502' in rest


@scenario(api_key=KEY, member_drain_timeout=0.05)
async def test_a_drain_has_a_limit(rig: Rig) -> None:
    w, other = await rig.instance("hang"), await rig.instance()
    client = await route(rig, worker=[w])
    running = asyncio.create_task(generate(client))
    await w.arrived.wait()
    await client.post("/workers", json={"url": other.url})
    await until(client, {w.url: "ready", other.url: "ready"})
    assert await delete(client, w) == (202, "draining")
    assert (await running).status_code == 200
    assert await states(client) == {other.url: "ready"}


@pytest.mark.parametrize("path", ["/kv/restore", "/kv/snapshot", "/slots/0?action=save", "/tokenize"])
def test_a_drain_waits_for_questions(path: str) -> None:
    @scenario(api_key=KEY)
    async def run(rig: Rig) -> None:
        w, other = await rig.instance(), await rig.instance()
        w.holds = path
        client = await route(rig, worker=[w, other])
        asked = asyncio.create_task(client.post(path, json={"name": "s"}))
        await w.arrived.wait()
        assert [worker["in_flight"] for worker in await listed(client)] == [1, 0]
        assert Page((await client.get("/metrics")).text).total("pdserve_router_instance_in_flight", url=w.url) == 1
        assert await delete(client, w) == (202, "draining")
        w.go_on.set()
        assert (await asked).json()["from"] == w.port
        await until(client, {other.url: "ready"})

    run()


@scenario(api_key=KEY)
async def test_a_drain_does_not_wait_for_reads(rig: Rig) -> None:
    w = await rig.instance()
    w.holds = "/v1/models"
    client = await route(rig, worker=[w])
    asked = asyncio.create_task(client.get("/v1/models"))
    await w.arrived.wait()
    assert await delete(client, w) == (200, "gone")
    w.go_on.set()
    assert (await asked).json()["from"] == w.port


@scenario(api_key=KEY, member_drain_timeout=0.05)
async def test_a_question_that_outlasts_a_drain_may_still_be_answered(rig: Rig) -> None:
    w = await rig.instance()
    w.holds = "/kv/restore"
    client = await route(rig, worker=[w])
    asked = asyncio.create_task(client.post("/kv/restore", json={"name": "s"}))
    await w.arrived.wait()
    assert await delete(client, w) == (202, "draining")
    await until(client, {})
    w.go_on.set()
    assert (await asked).json()["from"] == w.port


@scenario(api_key=KEY)
async def test_an_instance_that_was_removed_meanwhile_is_not_asked(rig: Rig) -> None:
    first, second = await rig.instance(), await rig.instance()
    first.holds, first.answers["/kv/restore"] = "/kv/restore", (404, {})
    client = await route(rig, worker=[first, second])
    asked = asyncio.create_task(client.post("/kv/restore", json={"name": "s"}))
    await first.arrived.wait()
    assert await delete(client, second) == (200, "gone")
    first.go_on.set()
    assert (await asked).status_code == 404
    assert "/kv/restore" not in [path for _, path, _ in second.questions]


@scenario(api_key=KEY)
async def test_one_instance_is_one_member_in_all_spellings_of_its_url(rig: Rig) -> None:
    w = await rig.instance()
    client = await route(rig, worker=[w])
    spelling = f"HTTP://127.0.0.1.:0{w.port}/"
    again = await client.post("/workers", json={"url": spelling})
    assert (again.status_code, again.json()["error"]["message"]) == (409, f"url: {w.url} is a member, in state ready")
    cordoned = await client.patch("/workers", params={"url": spelling}, json={"state": "cordoned"})
    assert (cordoned.json()["url"], cordoned.json()["state"]) == (w.url, "cordoned")


@scenario(api_key=KEY)
async def test_an_instance_that_is_a_member_by_another_name_gets_no_requests_by_it(rig: Rig) -> None:
    """Otherwise cordoning it by the one name would not keep requests away."""
    w, alias = await rig.instance(), await rig.instance()
    w.health_report = alias.health_report = {"epoch": "e1"}
    client = await route(rig, worker=[w])
    await client.post("/workers", json={"url": alias.url})
    await rig.until_states("healthy", "unhealthy")
    assert (await listed(client))[1]["reason"] == f"the same instance as {w.url}"
    await change(client, w, "cordoned")
    assert (await generate(client)).status_code == 503
    w.health_report = alias.health_report = {"epoch": "e2"}  # the process is started anew
    while [member["epoch"] for member in await listed(client)] != ["e2", "e2"]:
        await asyncio.sleep(0)
    await rig.until_states("healthy", "unhealthy")
    assert await delete(client, w) == (200, "gone")
    await rig.until_states("healthy")  # a member that was healthy once is ready, also if it is not healthy now
    assert (await generate(client)).status_code == 200


@scenario(api_key=KEY)
async def test_an_instance_is_served_by_another_name_if_the_first_is_down(rig: Rig) -> None:
    w, alias = await rig.instance(), await rig.instance()
    w.health_report = alias.health_report = {"epoch": "e1"}
    client = await route(rig, worker=[w])
    await client.post("/workers", json={"url": alias.url})
    await rig.until_states("healthy", "unhealthy")
    await w.kill()
    await rig.until_states("unhealthy", "healthy")
    await w.start()
    await rig.until_states("healthy", "unhealthy")


@scenario(api_key=KEY)
async def test_a_password_in_a_url_is_refused_and_not_repeated(rig: Rig) -> None:
    client = await route(rig)
    refused = await client.post("/workers", json={"url": "http://user:secret7@h:1"})
    assert (refused.status_code, "before an @" in refused.text, "secret7" in refused.text) == (400, True, False)


@scenario(api_key=KEY)
async def test_a_prefill_is_replaced(rig: Rig) -> None:
    old, new, d = await rig.instance(), await rig.instance(), await rig.instance()
    client = await route(rig, prefill=[old], decode=[d])
    await client.post("/workers", json={"url": new.url, "role": "prefill", "bootstrap_port": 9002})
    await rig.until_states("healthy", "healthy", "healthy")
    assert await delete(client, old) == (200, "gone")
    assert (await generate(client)).status_code == 200
    assert (len(old.requests), len(new.requests), d.requests[0].body["bootstrap_port"]) == (0, 1, 9002)


def test_no_connection_to_a_removed_instance_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "KEEP_SECONDS", 3600.0)

    @scenario(api_key=KEY)
    async def run(rig: Rig) -> None:
        w = await rig.instance()
        client = await route(rig, worker=[w])
        assert (await generate(client)).status_code == 200
        assert w._writers
        assert await delete(client, w) == (200, "gone")
        while w._writers:
            await asyncio.sleep(0)

    run()


def test_an_address_that_does_not_prove_the_cluster_secret_is_sent_nothing(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s" * 40 + "\n")

    @scenario(api_key=KEY, cluster_secret_file=str(tmp_path / "secret"))
    async def run(rig: Rig) -> None:
        stranger = await rig.instance()
        client = await route(rig)
        assert (await client.post("/workers", json={"url": stranger.url})).status_code == 201
        await rig.until_states("unhealthy")
        [worker] = await listed(client)
        assert worker["state"] == "joining"
        assert "can't prove that it belongs to this cluster" in worker["reason"]
        assert (await generate(client)).status_code == 503
        assert (await client.post("/tokenize", json={"prompt": "a"})).status_code == 503
        assert stranger.requests == []
        assert {path for _, path, _ in stranger.questions} == {"/livez"}

    run()


@pytest.mark.parametrize(
    ("method", "query", "body", "status", "says"),
    [
        ("POST", "", b"{", 400, "the body is not valid JSON"),
        ("POST", "", b"\xff", 400, "the body is not valid JSON"),
        ("POST", "", b"[" * 8000, 400, "the body"),
        ("POST", "", b"[]", 400, "the body does not fit"),
        ("POST", "", b"{}", 400, "missing required field `url`"),
        ("POST", "", b'{"url": 3}', 400, "$.url"),
        ("POST", "", b'{"url": "http://h:1", "rank": 3}', 400, "unknown field `rank`"),
        ("POST", "", b'{"url": "h:1"}', 400, "url: 'h:1' is not an instance's URL"),
        ("POST", "", b'{"url": "http://h:1/v1"}', 400, "is not an instance's URL"),
        ("POST", "", b'{"url": "http://h\\n:1"}', 400, "is not an instance's URL"),
        ("POST", "", b'{"url": "http://%b"}' % (b"h" * 3000), 400, "the limit is 2048"),
        ("POST", "", b'{"url": "http://h:1", "role": "king"}', 400, "role: is none of prefill, decode, worker: 'king'"),
        ("POST", "", b'{"url": "http://h:1", "bootstrap_port": 0}', 400, "$.bootstrap_port"),
        ("POST", "", b'{"url": "http://h:1", "role": "decode", "bootstrap_port": 9}', 400, "only prefills"),
        ("POST", "?url=http://h:1", b'{"url": "http://h:1"}', 400, "url: there is no such parameter"),
        ("POST", "", b" " * 9000 + b"{}", 413, "the limit here is 8192"),
        ("PATCH", "", b'{"state": "ready"}', 400, "url: name an instance"),
        ("PATCH", "?url=http://h:1", b'{"state": "ready"}', 404, "no instance at http://h:1"),
        ("PATCH", "?url=x", b'{"state": "ready"}', 400, "is not an instance's URL"),
        ("PATCH", "?url={w}", b'{"state": "gone"}', 400, "state: is none of ready, cordoned: 'gone'"),
        ("PATCH", "?url={w}&url={w}", b'{"state": "ready"}', 400, "given twice"),
        ("DELETE", "", b"", 400, "url: name an instance"),
        ("DELETE", "?url={w}&drain=maybe", b"", 400, "drain: is true or false"),
        ("DELETE", "?url={w}&when=now", b"", 400, "when: there is no such parameter; there is url and drain"),
        ("DELETE", "?url=http://h:1", b"", 404, "GET /workers lists them"),
        ("GET", "?x=1", b"", 400, "x: there is no such parameter"),
    ],
)
def test_a_bad_request_changes_nothing(method: str, query: str, body: bytes, status: int, says: str) -> None:
    @scenario(api_key=KEY)
    async def run(rig: Rig) -> None:
        w = await rig.instance()
        client = await route(rig, worker=[w])
        answer = await client.request(method, "/workers" + query.format(w=w.url), content=body)
        assert answer.status_code == status
        error = answer.json()["error"]
        assert (error["status"], says in error["message"]) == (status, True), error
        assert await states(client) == {w.url: "ready"}

    run()


@scenario(api_key=KEY)
async def test_an_instance_is_added_once(rig: Rig) -> None:
    w = await rig.instance()
    client = await route(rig, worker=[w])
    again = await client.post("/workers", json={"url": w.url})
    assert (again.status_code, again.json()["error"]["message"]) == (409, f"url: {w.url} is a member, in state ready")
    assert [worker["source"] for worker in await listed(client)] == ["option"]


@scenario(api_key=KEY)
async def test_an_order_that_arrives_slowly_does_not_bring_back_what_was_removed_meanwhile(rig: Rig) -> None:
    w, other = await rig.instance(), await rig.instance()
    client = await route(rig, worker=[w, other])
    begun, removed = asyncio.Event(), asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b'{"state":'
        begun.set()
        await removed.wait()
        yield b'"cordoned"}'

    slow = asyncio.create_task(client.patch("/workers", params={"url": w.url}, content=body()))
    await begun.wait()
    # The router has the head of the other request by the time that it has answered this one.
    assert await states(client) == {w.url: "ready", other.url: "ready"}
    assert await delete(client, w) == (200, "gone")
    removed.set()
    assert (await slow).status_code == 404
    assert await states(client) == {other.url: "ready"}
