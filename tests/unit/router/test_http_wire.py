"""HTTP as clients speak it, byte by byte, to a router and to an instance on real sockets and the loop that they use."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import psutil
import pytest
import uvloop
from support.admin_key import as_admin
from support.fake_engine import FakeEngine
from support.machine import limit
from support.router_rig import FLOOD_EVENTS, Rig
from support.served_app import serving

from pdserve.router.options import RouterOptions
from pdserve.runtime.web.server import server_config
from pdserve.server.options import ServerOptions

BODY = b'{"text": "a", "stream": true, "sampling_params": {"max_new_tokens": 2}}'
TIME_LIMIT = limit(10.0)
DONE = b"data: [DONE]\n\n"


def head(*lines: bytes, first: bytes = b"GET /livez HTTP/1.1") -> bytes:
    return b"\r\n".join([first, b"host: localhost", *lines, b"", b""])


def post(*lines: bytes, version: bytes = b"1.1", body: bytes = BODY) -> bytes:
    return head(*lines, b"content-length: %d" % len(body), first=b"POST /generate HTTP/" + version) + body


class Answer:
    """One answer, read until its declared end, or that of the connection."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes, *, at_end: bool) -> None:
        self.status, self.headers, self.body, self.at_end = status, headers, body, at_end


async def read_answer(reader: asyncio.StreamReader, *, has_body: bool = True) -> Answer:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)}
    status, body, at_end = int(lines[0].split()[1]), b"", False
    if not has_body or status in (100, 204):
        pass
    elif "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    elif headers.get("transfer-encoding") == "chunked":
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size + 2)
        await reader.readexactly(2)
    else:
        body, at_end = await reader.read(), True
    return Answer(status, headers, body, at_end=at_end)


@asynccontextmanager
async def instance(**options: Any) -> AsyncIterator[int]:
    async with serving(FakeEngine(**options)) as port:
        yield port


@asynccontextmanager
async def router(**options: Any) -> AsyncIterator[int]:
    rig = Rig(**options)
    client = await rig.route(worker=[await rig.instance()])
    try:
        yield client.base_url.port or 0
    finally:
        await rig.close()


FRONTS = {"instance": instance, "router": router}


@pytest.fixture(params=FRONTS)
def front(request: pytest.FixtureRequest) -> Callable[[Callable[[int], Awaitable[None]]], None]:
    """Runs a check on the port of each server in turn."""

    def run(check: Callable[[int], Awaitable[None]], **options: Any) -> None:
        async def body() -> None:
            async with asyncio.timeout(TIME_LIMIT), FRONTS[request.param](**options) as port:
                await check(port)

        uvloop.run(body())

    return run


async def ask(port: int, data: bytes, answers: int = 1, *, has_body: bool = True) -> tuple[list[Answer], bool]:
    """Return the answers to ``data``, and whether the connection is still open after ``answers`` answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    got = [await read_answer(reader, has_body=has_body) for _ in range(answers)]
    writer.write(head())
    try:
        again = await read_answer(reader)
        is_open = again.status == 200
    except (asyncio.IncompleteReadError, ConnectionError):
        is_open = False
    writer.close()
    return got, is_open


def test_http_1_0_gets_no_chunks(front: Any) -> None:
    async def check(port: int) -> None:
        for lines in ((), (b"connection: keep-alive",)):
            [answer], is_open = await ask(port, post(*lines, version=b"1.0"))
            assert (answer.status, answer.at_end, is_open) == (200, True, False)
            assert "transfer-encoding" not in answer.headers
            assert answer.headers["connection"] == "close"
            assert answer.body.startswith(b"data: ")
            assert answer.body.endswith(DONE)

    front(check)


def test_http_1_0_may_keep_its_connection(front: Any) -> None:
    async def check(port: int) -> None:
        first = b"GET /livez HTTP/1.0"
        [answer], is_open = await ask(port, head(first=first))
        assert (answer.body, answer.headers["connection"], is_open) == (b'{"status":"alive"}', "close", False)
        [answer], is_open = await ask(port, head(b"connection: keep-alive", first=first))
        assert (answer.body, answer.headers["connection"], is_open) == (b'{"status":"alive"}', "keep-alive", True)

    front(check)


def test_http_1_1_gets_chunks(front: Any) -> None:
    async def check(port: int) -> None:
        [answer], is_open = await ask(port, post())
        assert (answer.headers["transfer-encoding"], is_open) == ("chunked", True)

    front(check)


def test_head_is_get_without_the_body(front: Any) -> None:
    async def check(port: int) -> None:
        for path in (b"/livez", b"/health", b"/metrics", b"/livez/"):
            [got], _ = await ask(port, head(first=b"GET " + path + b" HTTP/1.1"))
            [answer], is_open = await ask(port, head(first=b"HEAD " + path + b" HTTP/1.1"), has_body=False)
            assert (answer.status, is_open) == (200, True)
            if path != b"/metrics":
                assert answer.headers["content-length"] == got.headers["content-length"]

    front(check)


def test_both_say_the_same_of_themselves(front: Any) -> None:
    async def check(port: int) -> None:
        [answer], _ = await ask(port, head())
        assert "server" not in answer.headers

    front(check)


def test_a_body_may_wait_to_be_asked_for(front: Any) -> None:
    async def check(port: int) -> None:
        [first, answer], is_open = await ask(port, post(b"expect: 100-continue"), 2)
        assert (first.status, answer.status, is_open) == (100, 200, True)
        # What is refused before leaves the body unsent; the next request would be taken for it.
        refused = head(b"expect: 100-continue", b"content-length: 9", first=b"POST /nowhere HTTP/1.1")
        [answer], is_open = await ask(port, refused)
        assert (answer.status, answer.headers["connection"], is_open) == (404, "close", False)
        # HTTP/1.0 knows nothing of it.
        [answer], _ = await ask(port, post(b"expect: 100-continue", version=b"1.0"))
        assert answer.status == 200

    front(check)


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_a_request_that_asks_for_another_protocol_is_served_in_this_one(front: Any, protocol: bytes) -> None:
    async def check(port: int) -> None:
        upgrade = [b"connection: Upgrade, HTTP2-Settings", b"upgrade: " + protocol, b"http2-settings: AA"]
        [answer], is_open = await ask(port, post(*upgrade))
        assert (answer.status, answer.body.endswith(DONE + b"\r\n"), is_open) == (200, True, True)
        got, is_open = await ask(port, head(*upgrade) + post(*upgrade) + head(), 3)
        assert ([answer.status for answer in got], is_open) == ([200, 200, 200], True)
        [answer], is_open = await ask(port, head(b"connection: close, upgrade", *upgrade[1:]))
        assert (answer.status, is_open) == (200, False)

    front(check)


def test_a_request_may_name_the_whole_url(front: Any) -> None:
    async def check(port: int) -> None:
        [answer], is_open = await ask(port, head(first=b"GET http://localhost/livez?x=1 HTTP/1.1"))
        assert (answer.status, is_open) == (200, True)
        for method, target, status in (
            (b"CONNECT", b"localhost:80", 400),
            (b"CONNECT", b"/livez", 400),
            (b"OPTIONS", b"*", 404),
            (b"OPTIONS", b"/livez", 204),
            (b"GET", b"/LIVEZ", 404),
            (b"BREW", b"/livez", 400),
        ):
            [answer], is_open = await ask(port, head(first=method + b" " + target + b" HTTP/1.1"))
            assert (answer.status, is_open) == (status, status != 400), target
            assert status == 204 or json.loads(answer.body)["error"]["status"] == status

    front(check)


def test_a_compressed_body_is_refused_by_name(front: Any) -> None:
    async def check(port: int) -> None:
        [answer], _ = await ask(port, post(b"content-encoding: gzip", body=b"\x1f\x8b"))
        assert (answer.status, b"'gzip'" in answer.body) == (415, True)
        [answer], _ = await ask(port, post(b"content-encoding: identity"))
        assert answer.status == 200

    front(check)


def test_trailers_are_no_headers(front: Any) -> None:
    async def check(port: int) -> None:
        key = b"authorization: Bearer secret"
        chunked = b"transfer-encoding: chunked"
        data = head(chunked, first=b"POST /tokenize HTTP/1.1") + b"0\r\n" + key + b"\r\n\r\n"
        [answer], is_open = await ask(port, data)
        assert (answer.status, is_open) == (401, True)

    front(check, api_key="secret")


def test_an_idle_connection_is_kept_as_long_as_the_option_says(front: Any) -> None:
    async def check(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head())
        await read_answer(reader)
        assert await reader.read() == b""  # closed by the server
        writer.close()

    front(check, keep_alive_timeout=0.05)


def test_uvicorn_is_given_the_option_and_not_its_own_five_seconds() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("nobody asks")

    for options in (ServerOptions, RouterOptions):
        assert server_config(app, options(keep_alive_timeout=33.5)).timeout_keep_alive == 33.5
        assert options().keep_alive_timeout > 60  # that of most proxies


def test_more_requests_than_the_limit_are_refused_and_polls_are_not() -> None:
    async def run() -> None:
        engine = FakeEngine(hold=True, max_concurrent_requests=2)
        async with serving(engine) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            client.auth = as_admin()
            asked = [asyncio.create_task(client.post("/generate", json={"text": "a"})) for _ in range(2)]
            await engine.wait_for(lambda: len(engine.requests) == 2)
            refused = await client.post("/generate", json={"text": "a"})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            error = refused.json()["error"]
            assert (error["type"], error["code"]) == ("overloaded_error", "overloaded")
            for path in ("/health", "/livez", "/metrics", "/transfers"):
                assert (await client.get(path)).status_code == 200
            assert (await client.post("/abort_request", json={"abort_all": True})).status_code == 200
            assert [(await answer).status_code for answer in asked] == [200, 200]
            engine.hold = False
            assert (await client.post("/generate", json={"text": "a"})).status_code == 200

    uvloop.run(asyncio.wait_for(run(), TIME_LIMIT))


async def open_and_never_read(port: int, path: str, body: bytes) -> socket.socket:
    """Send a request and never read its answer, on a socket that holds little."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", port))
    lines = (b"content-length: %d" % len(body),)
    await loop.sock_sendall(sock, head(*lines, first=b"POST " + path.encode() + b" HTTP/1.1") + body)
    return sock


@pytest.mark.parametrize("stream", [False, True])
def test_an_instance_ends_the_requests_of_clients_that_do_not_read(stream: bool) -> None:
    """Both kinds of answer; what their clients asked for ends at the engine."""

    async def run() -> None:
        engine = FakeEngine(send_timeout=0.2)
        text = "x" * 2**20
        body = json.dumps({"text": "a", "stream": stream, "sampling_params": {"max_new_tokens": 16}}).encode()
        engine.text = with_text(engine.text, text)  # type: ignore[method-assign]
        async with serving(engine) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            socks = [await open_and_never_read(port, "/generate", body) for _ in range(3)]
            await engine.wait_for(lambda: len(engine.requests) == 3)
            while any(is_connected(port, sock) for sock in socks):
                assert (await client.get("/health")).status_code == 200
            assert (await client.get("/server_info")).json()["http"]["live_requests"] == 0
            for sock in socks:
                sock.close()

    uvloop.run(asyncio.wait_for(run(), TIME_LIMIT))


def with_text(make: Callable[..., Any], text: str) -> Callable[..., Any]:
    def longer(request: Any, _text: str, *rest: Any, **more: Any) -> Any:
        return make(request, text, *rest, **more)

    return longer


def is_connected(port: int, sock: socket.socket) -> bool:
    """Return whether a server in this process still has its end of the connection of ``sock``."""
    ends = psutil.Process().net_connections("tcp4")
    return any(end.laddr[1] == port and end.raddr == sock.getsockname() for end in ends)


def test_a_router_ends_the_requests_of_clients_that_do_not_read() -> None:
    async def run() -> None:
        rig = Rig(send_timeout=0.2)
        flood, other = await rig.instance("flood"), await rig.instance()
        client = await rig.route(worker=[flood, other])
        sock = await open_and_never_read(client.base_url.port or 0, "/generate", b'{"text": "x", "stream": true}')
        while not flood.requests:
            await asyncio.sleep(0)
        # The connection to the instance is dropped, too, long before the flood is over.
        while (info := (await client.get("/server_info")).json()["instances"])[0]["in_flight"]:
            assert (await client.get("/health")).status_code == 200
        while is_connected(client.base_url.port or 0, sock):
            assert (await client.get("/health")).status_code == 200
        assert flood.flooded < FLOOD_EVENTS
        assert [(i["failures"], i["state"]) for i in info] == [(0, "healthy"), (0, "healthy")]
        sock.close()
        await rig.close()

    uvloop.run(asyncio.wait_for(run(), TIME_LIMIT))
