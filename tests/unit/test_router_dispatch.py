"""The router in front of scripted instances: real sockets, one event loop, no model."""

import asyncio
import contextlib
import json
import socket
from dataclasses import dataclass, field

import httpx
import uvicorn

from pdserve.router.app import make_app
from pdserve.router.options import RouterOptions

TIME_LIMIT = 10.0
EVENT = b'data: {"text": "a"}\n\n'
DONE = b"data: [DONE]\n\n"


@dataclass
class Seen:
    """A request that an instance got, and whether its connection was dropped before it was answered."""

    path: str
    headers: dict
    body: dict
    dropped: asyncio.Event = field(default_factory=asyncio.Event)


class FakeInstance:
    """An HTTP server that answers by script: the script's name says what happens to a generation."""

    def __init__(self, script="ok", health=200):
        self.script, self.health = script, health
        self.requests, self.questions = [], []
        self.arrived = asyncio.Event()
        self.go_on = asyncio.Event()
        self.port = 0
        self._writers = set()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    async def start(self):
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def kill(self):
        """What kill -9 does to a process's sockets."""
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await self._server.wait_closed()

    async def _connection(self, reader, writer):
        self._writers.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._one_request(reader, writer):
                pass
        self._writers.discard(writer)
        writer.close()

    async def _one_request(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if path == "/health":
            self.reply(writer, self.health, {})
        elif path in ("/generate", "/v1/completions"):
            seen = Seen(path, headers, json.loads(body))
            self.requests.append(seen)
            self.arrived.set()
            await getattr(self, "do_" + self.script)(seen, reader, writer)
        else:
            self.questions.append((method, path, body))
            self.reply(writer, 200, {"from": self.port})
        await writer.drain()
        return not writer.is_closing()

    def reply(self, writer, status, content, extra=""):
        body = json.dumps(content).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{extra}content-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)

    def chunk(self, writer, data):
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    def begin_stream(self, writer):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")

    async def do_ok(self, seen, reader, writer):
        if not seen.body.get("stream"):
            return self.reply(writer, 200, {"text": "ab", "seen": seen.body})
        self.begin_stream(writer)
        for data in (EVENT, EVENT[:7], EVENT[7:] + DONE[:3], DONE[3:], b""):
            self.chunk(writer, data)
            await writer.drain()

    async def do_bad_request(self, seen, reader, writer):
        self.reply(writer, 400, {"error": {"message": "temperature: too hot", "type": "invalid_request_error"}})

    async def do_busy(self, seen, reader, writer):
        self.reply(writer, 503, {"error": {"message": "draining"}}, "retry-after: 7\r\n")

    async def do_crash_text(self, seen, reader, writer):
        self.reply(writer, 500, "Internal Server Error")

    async def do_error_event(self, seen, reader, writer):
        self.begin_stream(writer)
        self.chunk(writer, b'data: {"error": {"message": "the transfer failed", "code": 502}}\n\n')
        self.chunk(writer, b"")

    async def do_die(self, seen, reader, writer):
        writer.transport.abort()

    async def do_die_mid_stream(self, seen, reader, writer):
        self.begin_stream(writer)
        self.chunk(writer, EVENT + EVENT[:9])
        await writer.drain()
        await self.go_on.wait()
        writer.transport.abort()

    async def do_hang(self, seen, reader, writer):
        if not await reader.read(1):
            seen.dropped.set()
        writer.close()

    async def do_stream_then_hang(self, seen, reader, writer):
        self.begin_stream(writer)
        self.chunk(writer, EVENT)
        await self.do_hang(seen, reader, writer)


class QuietServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):
        yield


class Rig:
    """Instances, the router in front of them, and a client."""

    def __init__(self, **options):
        self.options = {"health_check_interval": 0.04, **options}
        self.instances = []

    async def instance(self, *args, **kwargs):
        self.instances.append(await FakeInstance(*args, **kwargs).start())
        return self.instances[-1]

    async def route(self, prefill=(), decode=(), worker=()):
        tokens = [token for instance in prefill for token in (instance.url, "9001")]
        urls = {"prefill": tokens, "decode": [i.url for i in decode], "worker": [i.url for i in worker]}
        faults = []
        app = make_app(RouterOptions(**urls, **self.options), faults.append)
        sock = socket.create_server(("127.0.0.1", 0))
        self.server = QuietServer(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
        self.task = asyncio.create_task(self.server.serve(sockets=[sock]))
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{sock.getsockname()[1]}", timeout=TIME_LIMIT)
        await self.until_states(*["healthy" if i.health == 200 else "unhealthy" for i in (*prefill, *decode, *worker)])
        self.faults = faults
        return self.client

    async def until_states(self, *wanted):
        """Wait until the router sees the instances' states as ``wanted``."""
        headers = {"authorization": f"Bearer {self.options.get('api_key')}"}
        while True:
            info = (await self.client.get("/server_info", headers=headers)).json()
            if [i["state"] for i in info["instances"]] == list(wanted):
                return info

    async def close(self):
        await self.client.aclose()
        self.server.should_exit = True
        await self.task
        for instance in self.instances:
            await instance.kill()
        assert self.faults == []


def scenario(**options):
    """Run an async test with a ``Rig``, within a time limit."""

    def wrap(test):
        def run():
            async def body():
                rig = Rig(**options)
                async with asyncio.timeout(TIME_LIMIT):
                    await test(rig)
                    await rig.close()

            asyncio.run(body())

        run.__name__ = test.__name__
        return run

    return wrap


async def generate(client, stream=False, **fields):
    return await client.post("/generate", json={"text": "x", "stream": stream, **fields})


@scenario()
async def test_both_legs_get_the_same_room_and_rid(rig):
    p, d = await rig.instance(), await rig.instance()
    client = await rig.route([p], [d])
    answer = (await generate(client, sampling_params={"temperature": 0.1})).json()
    again = (await generate(client)).json()
    sent_p, sent_d = p.requests[0].body, d.requests[0].body
    assert answer == {"text": "ab", "seen": sent_d}
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
async def test_bad_json_touches_no_instance(rig):
    p, d = await rig.instance(), await rig.instance()
    client = await rig.route([p], [d])
    for body in (b"{", b"[1]", b"", b'{"text": NaN}'):
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
async def test_retries_are_bounded_and_the_last_error_is_told(rig):
    w = await rig.instance("busy")
    client = await rig.route(worker=[w])
    response = await generate(client)
    assert (response.status_code, response.headers["retry-after"]) == (503, "7")
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
    assert rest.startswith(b"data: ")
    assert rest.endswith(b"\n\n")
    assert "closed the connection" in json.loads(rest[6:])["error"]["message"]
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


@scenario()
async def test_control_requests_reach_every_instance(rig):
    p, d = await rig.instance(), await rig.instance()
    client = await rig.route([p], [d])
    assert (await client.post("/abort_request", json={"rid": "r"})).status_code == 200
    assert (await client.post("/flush_cache")).status_code == 200
    for instance in (p, d):
        assert ("POST", "/abort_request", b'{"rid":"r"}') in instance.questions
        assert ("POST", "/flush_cache", b"") in instance.questions
    await d.kill()
    await rig.until_states("healthy", "unhealthy")
    assert (await client.get("/v1/models")).json() == {"from": p.port}
    assert (await client.post("/flush_cache")).status_code == 200


@scenario()
async def test_unknown_paths_and_methods_are_told_in_the_error_shape(rig):
    client = await rig.route(worker=[await rig.instance()])
    assert (await client.get("/nowhere")).json()["error"]["code"] == 404
    assert (await client.get("/generate")).json()["error"]["code"] == 405


@scenario()
async def test_health_generate_runs_a_real_request(rig):
    p, d = await rig.instance(), await rig.instance()
    client = await rig.route([p], [d])
    assert (await client.get("/health_generate")).status_code == 200
    assert p.requests[0].path == d.requests[0].path == "/generate"
