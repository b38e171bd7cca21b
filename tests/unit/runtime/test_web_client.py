"""The HTTP client against scripted servers: which connections it keeps, what it repeats, what it waits for."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from support.jumping_loop import JumpingLoop, run_jumping

from pdserve.runtime.web.client import client as client_module
from pdserve.runtime.web.client.client import RESEND_IDLE_SECONDS, HttpClient
from pdserve.runtime.web.client.errors import BadAnswer, CannotConnect, ConnectionGone
from pdserve.runtime.web.client.pool import KEEP_SECONDS
from pdserve.runtime.web.client.response import ClientResponse

PEM = Path(__file__).parents[2] / "support" / "localhost.pem"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Talk:
    """One request at the server, and the means to answer it."""

    def __init__(self, server: Server, number: int, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        self.server, self.number, self.head, self.body, self.writer = server, number, head, body, writer

    def reply(self, body: bytes) -> None:
        self.writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))

    def begin(self) -> None:
        self.writer.write(CHUNKED + b"1\r\na\r\n")


Script = Callable[[Talk], Awaitable[None]]


class Server:
    """``talks``: all requests; ``connections``: how many were made; ``dropped``: set when one was closed."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.talks: list[Talk] = []
        self.connections = 0
        self.dropped = asyncio.Event()
        self.arrived = asyncio.Event()
        self.url = ""
        self.listener: asyncio.Server
        self.writers: list[asyncio.StreamWriter] = []

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = self.connections
        self.connections += 1
        self.writers.append(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                sizes = [line.split(b":")[1] for line in head.split(b"\r\n") if line.startswith(b"content-length")]
                body = await reader.readexactly(int(sizes[0]) if sizes else 0)
                self.talks.append(Talk(self, number, head, body, writer))
                self.arrived.set()
                await self._script(self.talks[-1])
        self.dropped.set()
        writer.close()


@contextlib.asynccontextmanager
async def serving(script: Script, tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[Server, HttpClient]]:
    server = Server(script)
    server.listener = await asyncio.start_server(server.connection, "127.0.0.1", 0, ssl=tls)
    scheme = "https" if tls else "http"
    server.url = f"{scheme}://127.0.0.1:{server.listener.sockets[0].getsockname()[1]}"
    client = HttpClient([(b"user-agent", b"test")], 1.0, [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)])
    try:
        yield server, client
    finally:
        client.close()
        server.listener.close()
        for writer in server.writers:
            writer.transport.abort()
        # The transports close in the next turns of the loop.
        for _ in range(3):
            await asyncio.sleep(0)


async def say_ok(talk: Talk) -> None:
    talk.reply(b"ok")


def test_what_is_sent() -> None:
    async def body() -> None:
        async with serving(say_ok) as (server, client):
            headers = [(b"x-request-id", b"\xff")]
            assert (await client.fetch("POST", server.url, "/generate?a=b", b"{}", headers)).body == b"ok"
            await client.fetch("POST", server.url, "/flush")
            await client.fetch("GET", server.url, "/health")
            fixed = b"host: %b\r\nuser-agent: test\r\n" % server.url.removeprefix("http://").encode()
            assert [talk.head for talk in server.talks] == [
                b"POST /generate?a=b HTTP/1.1\r\n%bx-request-id: \xff\r\ncontent-length: 2\r\n\r\n" % fixed,
                b"POST /flush HTTP/1.1\r\n%bcontent-length: 0\r\n\r\n" % fixed,
                b"GET /health HTTP/1.1\r\n%b\r\n" % fixed,
            ]
            assert server.talks[0].body == b"{}"
            assert server.connections == 1

    asyncio.run(body())


@pytest.mark.parametrize(
    ("path", "value"), [("/a b", b""), ("/a\r\nx: y", b""), ("/é", b""), ("/", b"a\r\nx: y"), ("/", b"a\0")]
)
def test_what_would_be_another_request_is_not_sent(path: str, value: bytes) -> None:
    async def body() -> None:
        async with serving(say_ok) as (server, client):
            with pytest.raises(ValueError, match=r"not a (path|value)"):
                await client.send("GET", server.url, path, headers=[(b"a", value)])
            assert server.connections == 0

    asyncio.run(body())


def test_a_connection_is_kept_for_some_seconds_and_the_last_one_is_taken_first() -> None:
    async def body() -> None:
        async with serving(say_ok) as (server, client):
            await asyncio.gather(*(client.fetch("GET", server.url, "/") for _ in range(3)))
            assert server.connections == 3
            for _ in range(3):
                await asyncio.sleep(1.0)
                await client.fetch("GET", server.url, "/")
            assert len({talk.number for talk in server.talks[3:]}) == 1
            assert not server.dropped.is_set()
            await asyncio.sleep(KEEP_SECONDS - 1)
            await client.fetch("GET", server.url, "/")
            assert server.connections == 3
            assert server.dropped.is_set()  # the others, which got too old
            await asyncio.sleep(KEEP_SECONDS + 0.1)
            await client.fetch("GET", server.url, "/")
            assert server.connections == 4

    run_jumping(body())


def test_a_connection_that_was_given_up_while_idle_is_replaced_once() -> None:
    async def hang_up_later(talk: Talk) -> None:
        # Every connection serves one request, and closes without a word when it gets another.
        if [t.number for t in talk.server.talks].count(talk.number) == 1:
            talk.reply(b"ok")
        else:
            talk.writer.close()

    async def body() -> None:
        async with serving(hang_up_later) as (server, client):
            assert (await client.fetch("POST", server.url, "/", b"{}")).body == b"ok"
            await asyncio.sleep(RESEND_IDLE_SECONDS + 0.5)
            assert (await client.fetch("POST", server.url, "/", b"{}")).body == b"ok"
            assert [talk.number for talk in server.talks] == [0, 0, 1]
            # After a shorter time it was no keep-alive timeout, and the request may be what the server died of.
            await asyncio.sleep(RESEND_IDLE_SECONDS - 0.5)
            with pytest.raises(ConnectionGone):
                await client.fetch("POST", server.url, "/", b"{}")
            assert [talk.number for talk in server.talks] == [0, 0, 1, 1]

    run_jumping(body())


@pytest.mark.parametrize("idle", [0.0, RESEND_IDLE_SECONDS - 0.5, RESEND_IDLE_SECONDS + 0.5])
def test_what_is_to_be_sent_at_most_once_is(idle: float) -> None:
    """Not over a connection that may just be closed by its server; and where it fails, not again."""

    async def die_of_posts(talk: Talk) -> None:
        await (say_ok(talk) if talk.head.startswith(b"GET") else hang_up(talk))

    async def hang_up(talk: Talk) -> None:
        talk.writer.close()

    async def body() -> None:
        async with serving(die_of_posts) as (server, client):
            await asyncio.gather(*(client.fetch("GET", server.url, "/") for _ in range(2)))
            await asyncio.sleep(idle)
            with pytest.raises(ConnectionGone):
                await client.send("POST", server.url, "/", b"{}", at_most_once=True)
            assert [talk.body for talk in server.talks] == [b"", b"", b"{}"]
            assert (server.talks[-1].number == 2) == (idle > RESEND_IDLE_SECONDS)
            # The connections that it passed over are still there.
            await client.fetch("GET", server.url, "/")
            assert server.talks[-1].number < 2

    run_jumping(body())


def test_a_body_in_pieces_is_one_body() -> None:
    async def body() -> None:
        async with serving(say_ok) as (server, client):
            pieces = [memoryview(b"{} ")[:1], b"", b'"a":1}']
            assert (await client.fetch("POST", server.url, "/", pieces)).body == b"ok"
            assert server.talks[0].body == b'{"a":1}'
            assert b"content-length: 7\r\n" in server.talks[0].head

    asyncio.run(body())


def test_a_new_connection_that_is_closed_is_a_failure() -> None:
    async def hang_up(talk: Talk) -> None:
        talk.writer.close()

    async def first_only(talk: Talk) -> None:
        await (say_ok if len(talk.server.talks) == 1 else hang_up)(talk)

    async def body() -> None:
        for script, requests, before in ((hang_up, 1, 0), (first_only, 3, 1)):
            async with serving(script) as (server, client):
                for _ in range(before):
                    await client.fetch("GET", server.url, "/")
                    await asyncio.sleep(RESEND_IDLE_SECONDS + 0.5)
                with pytest.raises(ConnectionGone) as caught:
                    await client.fetch("GET", server.url, "/")
                assert caught.value.untouched
                assert len(server.talks) == requests

    run_jumping(body())


def test_an_answer_that_has_begun_is_not_asked_for_again() -> None:
    async def break_off(talk: Talk) -> None:
        if len(talk.server.talks) == 1:
            return talk.reply(b"ok")
        talk.writer.write(b"HTTP/1.1 2")
        talk.writer.close()

    async def body() -> None:
        async with serving(break_off) as (server, client):
            await client.fetch("GET", server.url, "/")
            with pytest.raises(ConnectionGone) as caught:
                await client.fetch("GET", server.url, "/")
            assert not caught.value.untouched
            assert len(server.talks) == 2

    asyncio.run(body())


def test_a_server_that_is_gone_is_reported_as_such() -> None:
    async def die(talk: Talk) -> None:
        if len(talk.server.talks) == 1:
            return talk.reply(b"ok")
        talk.server.listener.close()
        talk.writer.transport.abort()

    async def body() -> None:
        async with serving(die) as (server, client):
            await client.fetch("GET", server.url, "/")
            with pytest.raises(ConnectionGone):  # rather than that it couldn't be reached a moment later
                await client.fetch("GET", server.url, "/")
            with pytest.raises(CannotConnect, match="no connection to 127"):
                await client.fetch("GET", server.url, "/")

    asyncio.run(body())


def test_a_server_that_accepts_nothing_is_given_up() -> None:
    class NobodyAnswers(JumpingLoop):
        async def create_connection(self, *args: object, **kwargs: object) -> None:  # type: ignore[override]
            await asyncio.Event().wait()

    async def ask() -> None:
        with pytest.raises(CannotConnect, match=r"to \[::1\]:80 within 1 s"):
            await HttpClient([], 1.0).fetch("GET", "http://[::1]", "/")

    with asyncio.Runner(loop_factory=NobodyAnswers) as runner:
        runner.run(ask())


@pytest.mark.parametrize("begun", [False, True])
def test_who_is_cancelled_drops_the_connection(begun: bool) -> None:
    async def serve(talk: Talk) -> None:
        if begun:
            talk.begin()

    async def body() -> None:
        async with serving(serve) as (server, client):
            heard = asyncio.Event()

            async def ask() -> None:
                answer = await client.send("GET", server.url, "/")
                try:
                    while await answer.read():
                        heard.set()
                finally:
                    answer.close()

            asking = asyncio.create_task(ask())
            await (heard if begun else server.arrived).wait()
            asking.cancel()
            await server.dropped.wait()
            with pytest.raises(asyncio.CancelledError):
                await asking

    asyncio.run(body())


async def opened(server: Server, client: HttpClient, silence: float) -> ClientResponse:
    answer = await client.send("GET", server.url, "/", silence=silence)
    assert await answer.read() == b"a"
    return answer


def test_silence_is_limited_while_a_reader_waits() -> None:
    async def begin(talk: Talk) -> None:
        talk.begin()

    async def body() -> None:
        async with serving(begin) as (server, client):
            loop = asyncio.get_running_loop()
            answer = await opened(server, client, 10.0)
            # The reader's own time doesn't count, however the timer falls.
            for pause in (3.0, 25.0, 3.0):
                await asyncio.sleep(pause)
                reading = asyncio.create_task(answer.read())
                await asyncio.sleep(9.0)
                server.talks[0].writer.write(b"1\r\nb\r\n")
                assert await reading == b"b"
            since = loop.time()
            with pytest.raises(TimeoutError):
                await answer.read()
            assert loop.time() - since == pytest.approx(10.0)
            answer.close()

    run_jumping(body())


def test_a_whole_answer_is_limited_in_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_WHOLE_BYTES", 1)

    async def body() -> None:
        async with serving(say_ok) as (server, client):
            with pytest.raises(BadAnswer, match="more than 1 bytes"):
                await client.fetch("GET", server.url, "/")

    asyncio.run(body())


def test_tls_is_spoken_with_servers_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(PEM)

    async def ask() -> bytes:
        async with serving(say_ok, tls) as (server, client):
            return (await client.fetch("GET", server.url, "/")).body

    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with pytest.raises(CannotConnect, match="certificate"):
        asyncio.run(ask())
    monkeypatch.setenv("SSL_CERT_FILE", str(PEM))
    assert asyncio.run(ask()) == b"ok"


def test_all_https_servers_share_one_set_of_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set takes 65 ms to make, in which the event loop does nothing else, and 1 MiB."""
    made: list[ssl.SSLContext] = []

    def make() -> ssl.SSLContext:
        made.append(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        return made[-1]

    monkeypatch.setattr(ssl, "create_default_context", make)

    async def body() -> None:
        async with serving(say_ok) as (server, client):
            await client.fetch("GET", server.url, "/")
            assert made == []
            for host in ("127.0.0.1", "localhost"):
                with pytest.raises(CannotConnect):  # it speaks no TLS
                    await client.fetch("GET", server.url.replace("http://127.0.0.1", f"https://{host}"), "/")
            assert len(made) == 1

    asyncio.run(body())
