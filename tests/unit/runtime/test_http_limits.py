"""What one connection of the client-facing HTTP servers may send, and how long it may take: fed by hand, no clock."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from pdserve.runtime.web import limited_protocol
from pdserve.runtime.web.connections import Connections
from pdserve.runtime.web.limited_protocol import BODY_SECONDS, HEAD_SECONDS, SEND_SECONDS
from pdserve.runtime.web.sending import CHECKS, KERNEL_SEND_BYTES, RESET_ON_CLOSE, limit_socket

HEAD = b"POST / HTTP/1.1\r\nhost: a\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


class Timer:
    def __init__(self, seconds: float, act: Callable[[], None]) -> None:
        self.seconds, self.act, self.cancelled = seconds, act, False

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """Timers that the test fires; the tasks of a real loop."""

    def __init__(self) -> None:
        self.timers: list[Timer] = []

    def call_later(self, seconds: float, act: Callable[[], None]) -> Timer:
        self.timers.append(Timer(seconds, act))
        return self.timers[-1]

    def create_task(self, *args: Any, **kwargs: Any) -> asyncio.Task[Any]:
        return asyncio.get_running_loop().create_task(*args, **kwargs)

    def waiting(self) -> list[float]:
        return [t.seconds for t in self.timers if not t.cancelled]

    def fire(self) -> None:
        [timer] = [t for t in self.timers if not t.cancelled]
        self.timers.clear()
        timer.act()


class Transport(asyncio.Transport):
    def __init__(self, sock: socket.socket | None = None) -> None:
        super().__init__({"socket": sock})
        self.written = b""
        self.closed = ""
        self.waiting = 0
        """Bytes that the client has not taken."""

    def write(self, data: Any) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def is_closing(self) -> bool:
        return bool(self.closed)

    def close(self) -> None:
        self.closed = self.closed or "closed"

    def abort(self) -> None:
        self.closed = "aborted"

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Connection:
    """One connection to an app that reads its request and then answers when ``go_on`` is set."""

    def __init__(self, sock: socket.socket | None = None, connections: Connections | None = None) -> None:
        self.loop, self.transport = Loop(), Transport(sock)
        self.go_on = asyncio.Event()
        self.reads = True
        config = uvicorn.Config(self._app, interface="asgi3", log_config=None)
        protocol = limited_protocol.limited_protocol(SEND_SECONDS, connections or Connections(100))
        self.protocol = protocol(config, ServerState(), {}, self.loop)  # type: ignore[arg-type]
        self.protocol.connection_made(self.transport)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/early":
            await send({"type": "http.response.start", "status": 200, "headers": []})
        while self.reads and (await receive()).get("more_body"):
            pass
        await self.go_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    async def feed(self, *parts: bytes) -> None:
        for part in parts:
            if not self.transport.closed:
                self.protocol.data_received(part)
            await asyncio.sleep(0)


def with_connection(body: Callable[[Connection], Any]) -> None:
    async def run() -> None:
        await body(Connection())

    asyncio.run(run())


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MAX_HEAD_BYTES": 200, "MAX_HEADERS": 8, "MIN_BODY_BYTES": 10, "MAX_QUEUED_BYTES": 100}.items():
        monkeypatch.setattr(limited_protocol, name, value)


@pytest.mark.parametrize(
    "parts",
    [
        [HEAD, *[b"a: " + b"x" * 30 + b"\r\n"] * 8],
        [HEAD + b"a: " + b"x" * 300 + b"\r\n\r\n"],
        [HEAD + b"a: ", *[b"x" * 20] * 20],
        [b"POST /", *[b"x" * 20] * 20],
        [HEAD + b"a: b\r\n" * 8 + b"\r\n"],
    ],
    ids=["many headers", "one long header", "a header that goes on and on", "a long path", "too many headers"],
)
def test_a_head_that_is_too_long_is_refused(parts: list[bytes]) -> None:
    async def run(connection: Connection) -> None:
        await connection.feed(*parts)
        assert connection.transport.closed == "closed"
        assert connection.transport.written.startswith(b"HTTP/1.1 431 ")
        assert connection.transport.written.count(b"HTTP/1.1") == 1

    with_connection(run)


@pytest.mark.parametrize(
    "parts",
    [[b"0\r\n", *[b"a: b\r\n"] * 20], [b"0\r\na: ", *[b"x" * 20] * 20], [b"1;", *[b"x" * 20] * 20]],
    ids=["trailers", "one trailer", "a chunk's extension"],
)
def test_endless_trailers_and_framing_end_the_connection(parts: list[bytes]) -> None:
    async def run(connection: Connection) -> None:
        await connection.feed(CHUNKED, b"3\r\nabc\r\n", *parts)
        assert connection.transport.closed == "closed"
        assert connection.transport.written.startswith(b"HTTP/1.1 431 ")
        # Nothing of an answer follows it.
        connection.go_on.set()
        await asyncio.sleep(0)
        assert connection.transport.written.count(b"HTTP/1.1") == 1

    with_connection(run)


def test_requests_within_the_limits_follow_each_other_on_a_connection() -> None:
    async def run(connection: Connection) -> None:
        connection.go_on.set()
        for _ in range(20):
            await connection.feed(CHUNKED, *[b"64\r\n" + b"x" * 100 + b"\r\n"] * 20, b"0\r\na: b\r\n\r\n", b"")
            await asyncio.sleep(0)
            assert connection.transport.written.endswith(b"done\r\n0\r\n\r\n")
            connection.transport.written = b""
        assert not connection.transport.closed

    with_connection(run)


@pytest.mark.parametrize("queued", [HEAD + b"content-length: 0\r\n\r\n", CHUNKED + b"1f\r\n" + b"x" * 31 + b"\r\n"])
def test_what_is_queued_behind_a_running_request_has_a_limit(queued: bytes) -> None:
    async def run(connection: Connection) -> None:
        await connection.feed(HEAD + b"\r\n", queued, *[queued if b"length" in queued else b"1\r\nx\r\n"] * 100)
        assert connection.transport.closed == "aborted"

    with_connection(run)


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"POST", HEAD])
def test_a_head_that_does_not_come_ends_the_connection(sent: bytes) -> None:
    async def run(connection: Connection) -> None:
        await connection.feed(*[sent] * bool(sent))
        assert connection.loop.waiting() == [HEAD_SECONDS]
        connection.loop.fire()
        assert connection.transport.closed == "aborted"

    with_connection(run)


def test_a_body_must_keep_coming() -> None:
    async def run(connection: Connection) -> None:
        await connection.feed(CHUNKED)
        for _ in range(3):
            assert connection.loop.waiting() == [BODY_SECONDS]
            await connection.feed(b"a\r\n0123456789\r\n")
            connection.loop.fire()
            assert not connection.transport.closed
        await connection.feed(b"1\r\n0\r\n")
        connection.loop.fire()
        assert connection.transport.closed == "closed"
        assert bytes(connection.transport.written).startswith(b"HTTP/1.1 408 ")

    with_connection(run)


def test_a_body_that_is_not_read_yet_is_not_slow() -> None:
    async def run(connection: Connection) -> None:
        await connection.feed(CHUNKED)
        connection.protocol.flow.pause_reading()
        connection.loop.fire()
        assert (connection.transport.closed, connection.loop.waiting()) == ("", [BODY_SECONDS])

    with_connection(run)


def test_a_running_answer_has_no_limit() -> None:
    async def run(connection: Connection) -> None:
        await connection.feed(HEAD + b"content-length: 1\r\n\r\nx")
        assert connection.loop.waiting() == []
        await connection.feed(b"\r\n")
        connection.loop.fire()
        assert not connection.transport.closed

    with_connection(run)


def test_an_answer_that_began_before_the_body_ended_is_not_cut() -> None:
    async def run(connection: Connection) -> None:
        await connection.feed(CHUNKED.replace(b"POST /", b"POST /early"))
        connection.loop.fire()
        assert not connection.transport.closed

    with_connection(run)


def test_an_error_in_a_body_is_a_400_unless_an_answer_has_begun() -> None:
    async def run(connection: Connection) -> None:
        await connection.feed(CHUNKED, b"ZZ\r\n")
        assert connection.transport.closed == "closed"
        assert connection.transport.written.startswith(b"HTTP/1.1 400 ")

    async def begun(connection: Connection) -> None:
        await connection.feed(CHUNKED.replace(b"POST /", b"POST /early"), b"ZZ\r\n")
        assert connection.transport.closed == "aborted"

    with_connection(run)
    with_connection(begun)


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "this port speaks HTTP/1.1, not HTTP/2"),
        (b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n", "CONNECT asks for a proxy, and this is none"),
        (b"SSH-2.0-client\r\n", "this is not HTTP/1.1: Invalid method encountered"),
        (HEAD + b"content-length: x\r\n\r\n", "this is not HTTP/1.1: Invalid character in Content-Length"),
    ],
    ids=["HTTP/2", "CONNECT", "SSH", "content-length"],
)
def test_a_request_that_cannot_be_read_is_told_why(sent: bytes, text: str) -> None:
    async def check(connection: Connection) -> None:
        await connection.feed(sent)
        assert connection.transport.closed
        assert connection.transport.written.startswith(b"HTTP/1.1 400 ")
        assert text.encode() in connection.transport.written

    with_connection(check)


def test_the_request_that_runs_hears_that_its_client_is_gone_and_not_only_one_queued_behind_it() -> None:
    async def run(connection: Connection) -> None:
        await connection.feed(2 * (HEAD + b"content-length: 0\r\n\r\n"), b"")
        connection.protocol.connection_lost(ConnectionResetError())
        connection.go_on.set()
        await asyncio.gather(*connection.protocol.tasks)
        assert connection.transport.written == b""

    with_connection(run)


async def answered_slowly(connection: Connection) -> None:
    """Send a whole answer that its client does not read."""
    connection.go_on.set()
    connection.transport.waiting = 100
    await connection.feed(HEAD + b"content-length: 0\r\n\r\n", b"")
    await asyncio.sleep(0)
    assert connection.transport.written.endswith(b"0\r\n\r\n")


def sending_timers(connection: Connection) -> list[Timer]:
    return [t for t in connection.loop.timers if not t.cancelled and t.seconds == SEND_SECONDS / CHECKS]


def fire_sending(connection: Connection) -> None:
    [timer] = sending_timers(connection)
    connection.loop.timers.remove(timer)
    timer.act()


def test_a_client_that_takes_nothing_of_a_whole_answer_is_disconnected() -> None:
    async def run(connection: Connection) -> None:
        await answered_slowly(connection)
        for check in range(CHECKS):
            assert connection.transport.closed == "", check
            fire_sending(connection)
        assert connection.transport.closed == "aborted"

    with_connection(run)


def test_a_client_that_takes_some_is_not() -> None:
    async def run(connection: Connection) -> None:
        await answered_slowly(connection)
        for check in range(10 * CHECKS):
            connection.transport.waiting -= check % (CHECKS - 1) == 0
            fire_sending(connection)
        assert connection.transport.closed == ""
        # A connection that has nothing to send is not watched.
        connection.transport.waiting = 0
        fire_sending(connection)
        assert sending_timers(connection) == []

    with_connection(run)


def test_a_full_buffer_is_watched_while_the_answer_goes_on() -> None:
    async def run(connection: Connection) -> None:
        connection.protocol.pause_writing()
        assert sending_timers(connection) == []
        connection.transport.waiting = 1
        connection.protocol.pause_writing()
        connection.protocol.pause_writing()
        assert len(sending_timers(connection)) == 1
        connection.protocol.connection_lost(None)
        assert connection.loop.waiting() == []

    with_connection(run)


def test_a_client_that_takes_no_error_is_disconnected_too() -> None:
    async def run(connection: Connection) -> None:
        connection.transport.waiting = 100
        await connection.feed(b"no request\r\n\r\n")
        assert connection.transport.written.startswith(b"HTTP/1.1 400")
        for _ in range(CHECKS):
            fire_sending(connection)
        assert connection.transport.closed == "aborted"

    with_connection(run)


def test_a_client_that_takes_nothing_is_reset() -> None:
    async def run(_: Connection) -> None:
        with socket.socket() as sock:
            connection = Connection(sock)
            await answered_slowly(connection)
            for _ in range(CHECKS):
                fire_sending(connection)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, len(RESET_ON_CLOSE)) == RESET_ON_CLOSE

    with_connection(run)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux alone has it")
def test_the_kernel_is_told_the_same() -> None:
    async def run(_: Connection) -> None:
        with socket.socket() as sock, socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_SEND_BYTES)
            Connection(sock)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * SEND_SECONDS
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            # The kernel doubles what it is told, up to a limit of its own.
            limited = other.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == limited
            limit_socket(Transport(sock), 2.5)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 2500

    with_connection(run)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def closed(*connections: Connection) -> list[str]:
    return [connection.transport.closed for connection in connections]


def run(check: Callable[[], Any]) -> None:
    asyncio.run(check())


def test_connections_that_wait_for_a_head_have_a_limit() -> None:
    async def check() -> None:
        counted = Connections(100, max_waiting=2)
        first, second, third = (Connection(connections=counted) for _ in range(3))
        await second.feed(b"GET / HTT")
        assert closed(first, second, third) == ["aborted", "", ""]
        # A request in progress is not ended, nor counted.
        await second.feed(b"P/1.1\r\nhost: a\r\n\r\n")
        fourth = Connection(connections=counted)
        assert closed(second, third, fourth) == ["", "", ""]
        # Idle again after its answer, it comes last.
        second.go_on.set()
        await settle()
        assert second.transport.written.endswith(b"0\r\n\r\n")
        assert closed(second, third, fourth) == ["", "aborted", ""]
        for connection in (first, second, third, fourth):
            connection.protocol.connection_lost(None)
        assert (counted.waiting, counted.head_bytes) == (0, 0)

    run(check)


def test_heads_without_an_end_have_a_limit_in_all() -> None:
    async def check() -> None:
        counted = Connections(100, max_head_bytes=150)
        first, second, third = (Connection(connections=counted) for _ in range(3))
        await first.feed(b"GET /abc", b"x" * 32)
        await second.feed(b"GET /" + b"x" * 65)
        assert counted.head_bytes == 110
        # What comes at once, and whole, is not held.
        await third.feed(HEAD + b"a: " + b"x" * 60 + b"\r\n\r\n", b"GET / HT")
        assert (counted.head_bytes, closed(first, second, third)) == (110, ["", "", ""])
        await first.feed(b"x" * 41)
        assert closed(first, second, third) == ["aborted", "", ""]
        assert counted.head_bytes == 70
        await second.feed(b" HTTP/1.1\r\n\r\n")
        assert counted.head_bytes == 0

    run(check)


@pytest.mark.parametrize(
    ("parts", "behind"),
    [
        ([HEAD + b"\r\nGET /abc HT"], 4),
        ([b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n"], 0),
    ],
    ids=["half a head behind a request", "a body that goes on after its answer"],
)
def test_what_goes_on_after_an_answer_waits_as_well(parts: list[bytes], behind: int) -> None:
    async def check() -> None:
        counted = Connections(100)
        connection = Connection(connections=counted)
        connection.reads = False
        await connection.feed(*parts)
        await settle()
        assert counted.waiting == 0
        connection.go_on.set()
        await settle()
        assert connection.transport.written.endswith(b"0\r\n\r\n")
        assert (counted.waiting, counted.head_bytes >= behind) == (1, True)

    run(check)


def test_timers_end_with_the_connection() -> None:
    async def run(connection: Connection) -> None:
        connection.protocol.connection_lost(None)
        assert connection.loop.waiting() == []

    with_connection(run)
