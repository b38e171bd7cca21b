"""The router's own endpoints, and what it asks of all instances."""

import asyncio
import json

import pytest
from support.router_rig import generate, scenario

from pdserve.router import endpoints
from pdserve.server.http.status import info
from pdserve.server.http.text import models


@scenario(api_key="secret")
async def test_the_api_key_is_checked_and_passed_on(rig):
    w = await rig.instance()
    client = await rig.route(worker=[w])
    assert (await generate(client)).status_code == 401
    assert (await client.get("/server_info")).status_code == 401
    assert (await client.get("/health")).status_code == 200
    client.headers["authorization"] = "Bearer secret"
    assert (await generate(client)).status_code == 200
    assert w.requests[0].headers["authorization"] == "Bearer secret"


@pytest.mark.parametrize("has_users", [True, False])
def test_with_the_admin_key_instances_hear_whose_request_it_is(tmp_path, has_users):
    (tmp_path / "users").write_text("alice a-key\nbob b-key\n")
    (tmp_path / "admin").write_text("the-admin\n")
    options = {"admin_key_file": str(tmp_path / "admin")}
    if has_users:
        options["api_key_file"] = str(tmp_path / "users")

    @scenario(api_key="a-third" if has_users else None, **options)
    async def body(rig):
        p, d = await rig.instance(), await rig.instance()
        client = await rig.route([p], [d])
        forged = {"authorization": "Bearer a-key", "x-api-key": "x", "x-pdserve-key-name": "bob"}
        assert (await client.post("/generate", json={"text": "x"}, headers=forged)).status_code == 200
        for instance in (p, d):
            seen = instance.requests[0].headers
            assert seen["authorization"] == "Bearer the-admin"
            assert seen["x-pdserve-key-name"] == ("alice" if has_users else "")
            assert "x-api-key" not in seen
        refused = await client.post("/flush_cache", headers=forged)
        assert refused.status_code == (403 if has_users else 401)
        assert not [path for _, path, _ in p.questions if path == "/flush_cache"]
        flushed = await client.post("/flush_cache", headers={"authorization": "Bearer the-admin"})
        assert flushed.json()["flushed"] == 6

    body()


def test_instances_without_keys_hear_whose_request_it_is_too(tmp_path):
    (tmp_path / "users").write_text("alice a-key\nbob b-key\n")

    @scenario(api_key="a-third", api_key_file=str(tmp_path / "users"))
    async def body(rig):
        w = await rig.instance()
        client = await rig.route(worker=[w])
        await client.post("/generate", json={"text": "x"}, headers={"authorization": "Bearer b-key"})
        assert w.requests[0].headers["x-pdserve-key-name"] == "bob"
        assert w.requests[0].headers["authorization"] == "Bearer b-key"

    body()


@pytest.mark.parametrize("has_keys", [True, False])
def test_a_name_that_was_not_checked_owns_no_prefixes(has_keys, tmp_path, monkeypatch):
    (tmp_path / "users").write_text("bob b-key\n")
    made = []

    class Recorded(endpoints.Facts):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(endpoints, "Facts", Recorded)

    @scenario(**({"api_key": "a-third", "api_key_file": str(tmp_path / "users")} if has_keys else {}))
    async def body(rig):
        client = await rig.route(worker=[await rig.instance()])
        headers = {"authorization": "Bearer b-key", "x-pdserve-key-name": "bob"}
        assert (await client.post("/generate", json={"text": "x"}, headers=headers)).status_code == 200

    body()
    assert [facts.owner for facts in made] == ["bob" if has_keys else ""]


@scenario()
async def test_the_cache_is_not_flushed_by_a_get_nor_by_a_page(rig):
    w = await rig.instance()
    client = await rig.route(worker=[w])
    assert (await client.get("/flush_cache")).status_code == 405
    assert (await client.post("/flush_cache", headers={"origin": "https://evil.example"})).status_code == 403
    assert (await client.post("/flush_cache", headers={"host": "evil.example"})).status_code == 403
    assert not [path for _, path, _ in w.questions if path == "/flush_cache"]


@scenario()
async def test_orders_reach_every_instance_and_their_answers_are_added_up(rig):
    p, d, w = await rig.instance(), await rig.instance(), await rig.instance()
    client = await rig.route([p], [d], [w])
    p.legs = 1
    assert (await client.post("/abort_request", json={"rid": "r"})).json()["aborted"] == 2
    p.legs = 0  # it serves the request alone
    assert (await client.post("/abort_request", json={"rid": "r"})).json()["aborted"] == 3
    assert (await client.post("/flush_cache")).json()["flushed"] == 9
    for instance in (p, d, w):
        assert ("POST", "/abort_request", b'{"rid":"r"}') in instance.questions
        assert ("POST", "/flush_cache", b"") in instance.questions


@scenario()
async def test_orders_reach_an_instance_that_drains(rig):
    w, draining = await rig.instance(), await rig.instance()
    draining.health = 503
    client = await rig.route(worker=[w, draining])
    assert (await client.post("/abort_request", json={"rid": "r"})).status_code == 200
    assert ("POST", "/abort_request", b'{"rid":"r"}') in draining.questions


@scenario()
async def test_orders_do_not_reach_what_is_no_instance(rig):
    w, stranger = await rig.instance(), await rig.instance()
    stranger.health = 404
    client = await rig.route(worker=[w, stranger])
    assert (await client.post("/abort_request", json={"rid": "r"})).status_code == 200
    assert not [path for _, path, _ in stranger.questions if path == "/abort_request"]


@scenario()
async def test_open_handovers_of_all_instances_are_reported_together(rig):
    p, d = await rig.instance(), await rig.instance()
    client = await rig.route([p], [d])
    assert (await client.get("/transfers")).status_code == 401
    client.headers["authorization"] = "Bearer of-the-instances"
    listed = (await client.get("/transfers")).json()
    assert listed["open"] == 4
    assert {(t["room"], t["instance"]) for t in listed["transfers"]} == {(i.port, i.url) for i in (p, d)}
    await d.kill()
    await rig.until_states("healthy", "unhealthy")
    assert (await client.get("/transfers")).json()["open"] == 2
    refusal = {"error": {"message": "this needs the admin's key", "type": "invalid_request_error"}}
    for instance in rig.instances:
        instance.answers["/transfers"] = (401, refusal)
    refused = await client.get("/transfers")
    assert (refused.status_code, refused.json()) == (401, refusal)
    await p.kill()
    await rig.until_states("unhealthy", "unhealthy")
    assert (await client.get("/transfers")).status_code == 503


@scenario()
async def test_orders_pass_by_dead_instances_and_a_refusal_is_reported(rig):
    p, d = await rig.instance(), await rig.instance()
    client = await rig.route([p], [d])
    await d.kill()
    await rig.until_states("healthy", "unhealthy")
    assert (await client.get("/v1/models/any")).json()["from"] == p.port
    assert (await client.post("/flush_cache")).json()["flushed"] == 3
    p.refuses = True
    response = await client.post("/flush_cache")
    assert (response.status_code, response.json()["error"]["message"]) == (400, "busy")
    await p.kill()
    await rig.until_states("unhealthy", "unhealthy")
    assert (await client.post("/flush_cache")).status_code == 503


@scenario()
async def test_unknown_paths_and_methods_have_the_error_shape(rig):
    client = await rig.route(worker=[await rig.instance()])
    assert (await client.get("/nowhere")).json()["error"]["status"] == 404
    assert (await client.get("/generate")).json()["error"]["status"] == 405


@scenario()
async def test_questions_about_text_go_to_one_instance_with_their_body(rig):
    p, d = await rig.instance(), await rig.instance()
    client = await rig.route([p], [d])
    assert (await client.post("/tokenize", json={"prompt": "a"})).json()["from"] == d.port
    assert [(method, json.loads(body)) for method, path, body in d.questions if path == "/tokenize"] == [
        ("POST", {"prompt": "a"})
    ]
    assert (await client.get("/livez")).status_code == 200


@scenario()
async def test_health_generate_runs_a_real_request(rig):
    p, d = await rig.instance(), await rig.instance()
    client = await rig.route([p], [d])
    answer = await client.get("/health_generate")
    assert (answer.status_code, answer.json()) == (200, {"status": "ready"})
    assert p.requests[0].path == d.requests[0].path == "/generate"


@scenario()
async def test_headers_that_are_not_ascii_are_passed_on_as_they_are(rig):
    w = await rig.instance()
    client = await rig.route(worker=[w])
    headers = [(b"x-api-key", b"\xc3\xa9"), (b"authorization", b"\xc3\xbf"), (b"content-type", b"application/json")]
    trace = [(b"tracestate", b"a=b"), (b"traceparent", b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01")]
    headers += [*trace, (b"tracestate", b"\xc3\xa9"), (b"traceparent", b"00-x")]
    response = await client.post("/generate", content=b'{"text": "x"}', headers=headers)
    assert response.status_code == 200
    assert (w.requests[0].headers["x-api-key"], w.requests[0].headers["authorization"]) == ("é", "ÿ")
    # What is no trace is ignored, as its standard says; here it comes last, and would be what is found.
    assert [(n, w.requests[0].headers[n.decode()].encode()) for n, _ in trace] == trace
    assert (await client.get("/v1/models", headers=headers[:1])).status_code == 200


@scenario()
async def test_no_path_leads_to_another_endpoint_of_an_instance(rig):
    w = await rig.instance()
    await rig.route(worker=[w])
    host, port = rig.client.base_url.host, rig.client.base_url.port
    for path in ("/v1/models/../../flush_cache", "/v1/models/%2e%2e/%2e%2e/flush_cache", "/v1/models/./x"):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        assert (await reader.read()).startswith(b"HTTP/1.1 404 ")
        writer.close()
    await rig.client.get("/v1/models/a%3Fb")
    assert [path for _, path, _ in w.questions if "health" not in path and "info" not in path] == ["/v1/models/a%3Fb"]


def test_the_router_waits_for_longer_than_an_instance_takes_to_give_up():
    assert endpoints.QUESTION_TIMEOUT > info.QUESTION_TIMEOUT_SECONDS
    assert endpoints.TEXT_TIMEOUT > 2 * models.TIMEOUT_SECONDS  # the question, and then the limits


@scenario()
async def test_a_question_about_text_may_take_long_and_one_that_is_taken_out_is_not_waited_for(rig):
    slow, other = await rig.instance(), await rig.instance()
    client = await rig.route(worker=[slow, other])
    slow.holds = "/tokenize"
    asked: list[float] = []
    ask = endpoints.ControlEndpoints.ask

    async def watched(self, *args, seconds=0.0, **kwargs):
        asked.append(seconds)
        return await ask(self, *args, seconds=seconds, **kwargs)

    endpoints.ControlEndpoints.ask = watched
    try:
        asking = asyncio.create_task(client.post("/tokenize", json={"prompt": "a"}))
        await slow.arrived.wait()
        slow.health = 503
        assert (await asking).json()["from"] == other.port
    finally:
        endpoints.ControlEndpoints.ask = ask
        slow.go_on.set()
    assert asked[0] == endpoints.TEXT_TIMEOUT


@scenario()
async def test_a_question_about_text_that_takes_too_long_is_a_504_and_no_other_instance_is_asked(rig):
    silent, other = await rig.instance(), await rig.instance()
    client = await rig.route(worker=[silent, other])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(endpoints, "TEXT_TIMEOUT", 0.05)
        for path in ("/tokenize", "/detokenize"):
            silent.holds = path
            late = await client.post(path, json={"prompt": "a"})
            assert (late.status_code, late.json()["error"]["type"]) == (504, "timeout_error")
            assert "no answer within 0.05 s" in late.json()["error"]["message"]
            assert path not in [asked for _, asked, _ in other.questions]
    silent.go_on.set()
