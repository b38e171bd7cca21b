"""The router in front of scripted instances: real sockets, one event loop, no model."""

import asyncio
import contextlib
import json
from dataclasses import dataclass, field

import httpx
import uvicorn

from pdserve.router.app import make_app
from pdserve.router.options import RouterOptions
from pdserve.runtime.web.ports import listen
from pdserve.runtime.web.server import server_config

from .machine import limit

TIME_LIMIT = limit(10.0)
EVENT = b'data: {"text": "a"}\n\n'
DONE = b"data: [DONE]\n\n"
GENERATION_PATHS = ("/generate", "/v1/completions", "/completion", "/parley/say", "/api/chat")
FLOOD_EVENTS = 256
FLOOD_EVENT = b"data: " + b"x" * (1 << 18) + b"\n\n"
LONG_EVENT = b"data: " + b"x" * (8 << 20) + b"\n\n"
LONG_PART_BYTES = 64 << 10


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
        self.script, self.health, self.health_report = script, health, {}
        self.requests, self.questions = [], []
        self.answers = {}
        """Status and body of what is asked at a path."""
        self.arrived = asyncio.Event()
        self.go_on = asyncio.Event()
        self.port = 0
        self.refuses = False
        self.flooded = 0
        self.legs = 0
        self.follower = None
        self.holds = None
        """Path of a question that is answered only after ``go_on``."""
        self.dies_of = None
        """The text of a prompt that kills it, whatever its script."""
        self.error, self.pieces, self.last_piece = None, [], DONE
        """What the scripts ``error`` and ``pieces`` answer with."""
        self.content_type = b"text/event-stream"
        """Content type of its streams."""
        self.then = []
        """Events that are set once it has said that its peer is gone."""
        self._writers = set()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    async def start(self):
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def kill(self):
        """Abort the sockets as kill -9 of the process would."""
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await self._server.wait_closed()

    async def _connection(self, reader, writer):
        if not self._server.is_serving():  # it was accepted, and killed before it came to this
            writer.transport.abort()
            return
        self._writers.add(writer)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while await self._one_request(reader, writer):
                    pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _one_request(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if path == "/health":
            self.reply(writer, self.health, self.health_report)
        elif path in GENERATION_PATHS:
            seen = Seen(path, headers, json.loads(body))
            self.requests.append(seen)
            self.arrived.set()
            is_fatal = self.dies_of is not None and seen.body.get("text") == self.dies_of
            await getattr(self, "do_" + ("die" if is_fatal else self.script))(seen, reader, writer)
        else:
            self.questions.append((method, path, body))
            if path == self.holds:
                self.arrived.set()
                await self.go_on.wait()
            if path in self.answers:
                self.reply(writer, *self.answers[path])
                await writer.drain()
                return True
            answer = {"from": self.port, "flushed": 3, "aborted": 1, "legs": self.legs}
            answer |= {"open": 2, "transfers": [{"room": self.port}]}
            self.reply(writer, *((400, {"error": {"message": "busy"}}) if self.refuses else (200, answer)))
        await writer.drain()
        return not writer.is_closing()

    def reply(self, writer, status, content, extra=""):
        body = json.dumps(content).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{extra}content-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)

    def chunk(self, writer, data):
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    def begin_stream(self, writer):
        kind = b"content-type: " + self.content_type
        writer.write(b"HTTP/1.1 200 OK\r\n" + kind + b"\r\ntransfer-encoding: chunked\r\n\r\n")

    async def do_ok(self, seen, reader, writer):
        if not seen.body.get("stream"):
            return self.reply(writer, 200, {"text": "ab", "seen": seen.body})
        self.begin_stream(writer)
        for data in (EVENT, EVENT[:7], EVENT[7:] + DONE[:3], DONE[3:], b""):
            self.chunk(writer, data)
            await writer.drain()

    async def do_headers(self, seen, reader, writer):
        ours = "X-Request-Id: é \r\nx-accel-buffering: no\r\ncache-control: private\r\n"
        theirs = "server: x\r\ndate: x\r\nconnection: keep-alive\r\nkeep-alive: timeout=9\r\nset-cookie: a=b\r\n"
        again = "retry-after: 7\r\nx-should-retry: false\r\nx-pdserve-ignored: mirostat\r\n"
        self.reply(writer, seen.body["status"], {"text": "ab"}, f"{ours}{theirs}{again}")

    async def do_flood(self, seen, reader, writer):
        """Send 64 MiB, as fast as the reader takes them."""
        self.begin_stream(writer)
        while self.flooded < FLOOD_EVENTS:
            self.chunk(writer, FLOOD_EVENT)
            await writer.drain()
            self.flooded += 1
        self.chunk(writer, b"")

    async def do_long_event(self, seen, reader, writer):
        """Send an event, one of 8 MiB, and the last one. Die within the second one after ``breaks`` bytes, if given."""
        self.begin_stream(writer)
        self.chunk(writer, EVENT)
        for begin in range(0, len(LONG_EVENT), LONG_PART_BYTES):
            if begin >= seen.body.get("breaks", len(LONG_EVENT)):
                await self.go_on.wait()
                writer.transport.abort()
                return
            self.chunk(writer, LONG_EVENT[begin : begin + LONG_PART_BYTES])
            await writer.drain()
            self.flooded += 1
        self.chunk(writer, DONE)
        self.chunk(writer, b"")

    async def do_flood_and_leave(self, seen, reader, writer):
        """Send as ``flood`` or ``long`` do, and end the connection as an instance does if its client does not read."""

        async def leave():
            await self.go_on.wait()
            writer.transport.abort()

        leaving = asyncio.create_task(leave())
        try:
            await (self.do_flood if seen.body.get("stream") else self.do_long)(seen, reader, writer)
        finally:
            leaving.cancel()

    async def do_long(self, seen, reader, writer):
        """Send 64 MiB that are no stream, or half of it if the request says that it ``breaks``."""
        size = FLOOD_EVENTS * len(FLOOD_EVENT)
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {size}\r\n\r\n"
        writer.write(head.encode())
        while self.flooded < FLOOD_EVENTS // (2 if seen.body.get("breaks") else 1):
            writer.write(FLOOD_EVENT)
            await writer.drain()
            self.flooded += 1
        if seen.body.get("breaks"):
            writer.close()

    async def do_move(self, seen, reader, writer):
        """Begin an answer, and move the request to ``follower``. A client with the ticket gets the rest there."""
        ticket = {
            "epoch": "",
            "host": "127.0.0.1",
            "port": self.follower.port,
            "key": "k" * 32,
            "chars": 1,
            "tokens": 1,
        }
        ticket |= {"opened": True, "rid": "x", "created": 0}
        if not seen.body.get("stream"):
            body = json.dumps(ticket).encode()
            kind = "application/x-pdserve-moved+json"
            head = f"HTTP/1.1 200 X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            return
        self.begin_stream(writer)
        self.chunk(writer, EVENT)
        await writer.drain()
        last = b"event: moved\ndata: " + json.dumps(ticket).encode() + b"\n\n"
        for data in (last[:20], last[20:], b""):
            self.chunk(writer, data)
            await writer.drain()

    async def do_error(self, seen, reader, writer):
        self.reply(writer, self.error["status"], {"error": self.error})

    async def do_pieces(self, seen, reader, writer):
        self.begin_stream(writer)
        for data in (*self.pieces, *([self.last_piece] if self.last_piece else []), b""):
            self.chunk(writer, data)
            await writer.drain()
            await self.go_on.wait()  # so that the first is read by itself

    async def do_bad_request(self, seen, reader, writer):
        self.reply(writer, 400, {"error": {"message": "temperature: too hot", "type": "invalid_request_error"}})

    async def do_draining(self, seen, reader, writer):
        self.reply(writer, 503, {"error": {"message": "draining"}})

    async def do_full(self, seen, reader, writer):
        self.reply(writer, 429, {"error": {"message": "full", "code": "rate_limit_exceeded"}}, "retry-after: 7\r\n")

    async def do_too_large(self, seen, reader, writer):
        self.reply(writer, 413, {"error": {"message": "split the batch", "code": "batch_too_large"}})

    async def do_soon(self, seen, reader, writer):
        """Answer 503 with a retry time at first, and 200 from the second request on."""
        if len(self.requests) == 1:
            return self.reply(writer, 503, {"error": {"message": "loading"}}, "retry-after: 1\r\n")
        return await self.do_ok(seen, reader, writer)

    async def do_busy(self, seen, reader, writer):
        self.reply(writer, 503, {"error": {"message": "draining"}}, "retry-after: 7\r\n")

    async def do_crash_text(self, seen, reader, writer):
        self.reply(writer, 500, "Internal Server Error")

    async def do_error_event(self, seen, reader, writer):
        self.begin_stream(writer)
        self.chunk(writer, b'data: {"error": {"message": "the transfer failed", "code": 502}}\n\n')
        self.chunk(writer, b"")

    async def do_wait_and_die(self, seen, reader, writer):
        """Keeps the stream alive while its prompt waits, and dies before a token."""
        self.begin_stream(writer)
        self.chunk(writer, b": keep-alive\n\n")
        await writer.drain()
        await self.go_on.wait()
        await self.kill()

    async def do_die(self, seen, reader, writer):
        writer.transport.abort()

    async def do_die_on_request(self, seen, reader, writer):
        await self.go_on.wait()
        writer.transport.abort()

    async def do_peer_gone(self, seen, reader, writer):
        """Tells of its peer's death before that shows."""
        self.reply(writer, 503, {"error": {"message": "the peer is gone", "type": "transfer_error"}})
        await writer.drain()
        for event in self.then:
            event.set()

    async def do_die_mid_stream(self, seen, reader, writer):
        self.begin_stream(writer)
        self.chunk(writer, EVENT + EVENT[:9])
        await writer.drain()
        await self.go_on.wait()
        writer.transport.abort()

    async def do_flood_and_die(self, seen, reader, writer):
        """Send 16 MiB and then an ``EVENT``, and die when the test says so."""
        self.begin_stream(writer)
        for data in (*[FLOOD_EVENT] * 64, EVENT):
            self.chunk(writer, data)
            await writer.drain()
        await self.go_on.wait()
        writer.transport.abort()

    async def do_say_and_leave(self, seen, reader, writer):
        """Send the first piece, and end the connection before the stream has ended."""
        self.begin_stream(writer)
        self.chunk(writer, self.pieces[0])
        writer.close()

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

    async def route(self, prefill=(), decode=(), worker=(), *, ports=("9001",), states=None):
        """Start the router. ``states``: the states of the instances that the router must see before the
        test goes on.
        """
        tokens = [token for instance in prefill for token in (instance.url, *ports)]
        urls = {"prefill": tokens, "decode": [i.url for i in decode], "worker": [i.url for i in worker]}
        faults = []
        options = RouterOptions(**urls, **self.options)
        app = make_app(options, faults.append)
        sock = listen("127.0.0.1", 0, 128)
        self.server = QuietServer(server_config(app, options, timeout_graceful_shutdown=1))
        self.task = asyncio.create_task(self.server.serve(sockets=[sock]))
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{sock.getsockname()[1]}", timeout=TIME_LIMIT)
        states = states or ["healthy" if i.health == 200 else "unhealthy" for i in (*prefill, *decode, *worker)]
        await self.until_states(*states)
        self.faults = faults
        return self.client

    async def until_states(self, *wanted):
        """Wait until the router sees the instances' states as ``wanted``. A router with keys needs ``api_key``."""
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
                    try:
                        await test(rig)
                    finally:
                        await rig.close()  # else sockets that are left open fail the next test, too

            asyncio.run(body())

        run.__name__ = test.__name__
        return run

    return wrap


async def generate(client, stream=False, **fields):
    """POST /generate."""
    return await client.post("/generate", json={"text": "x", "stream": stream, **fields})
