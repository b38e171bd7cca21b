"""One connection of the HTTP client, fed by hand: what it makes of an answer, and whether it can be used again."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import Any

import pytest
import uvloop
from support.jumping_loop import run_jumping

from pdserve.runtime.web.client.connection import MAX_HEAD_BYTES, MAX_HEADERS, Connection, Headers
from pdserve.runtime.web.client.errors import BadAnswer, ClientError, ConnectionGone
from pdserve.runtime.web.client.response import CATCH_UP_SECONDS, MAX_BUFFERED, ClientResponse

OK = b"HTTP/1.1 200 OK\r\n"
SIZED = OK + b"content-length: 2\r\n\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.unsent = 0
        self.closed = False
        self.reading = True

    def writelines(self, list_of_data: Any) -> None:
        self.sent += b"".join(list_of_data)

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class Taker:
    """A receiver that writes down what it is told."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Headers = []
        self.body = b""
        self.ends: list[ClientError | None] = []

    def take_head(self, status: int, headers: Headers) -> None:
        assert not self.status
        self.status, self.headers = status, headers

    def take_body(self, data: bytes) -> None:
        assert data
        self.body += data

    def take_end(self, error: ClientError | None) -> None:
        self.ends.append(error)


def asked() -> tuple[Connection, Transport, Taker]:
    """Return a connection with one request under way."""
    connection, transport, taker = Connection(), Transport(), Taker()
    assert not connection.usable
    connection.connection_made(transport)
    assert connection.usable
    connection.ask([b"GET / ", b"HTTP/1.1\r\n\r\n"], taker)
    assert transport.sent == b"GET / HTTP/1.1\r\n\r\n"
    return connection, transport, taker


@pytest.mark.parametrize(
    ("answer", "status", "body", "kept"),
    [
        (SIZED + b"ab", 200, b"ab", True),
        (CHUNKED + b"1\r\na\r\n2;x=y\r\nbc\r\n0\r\n\r\n", 200, b"abc", True),
        (CHUNKED + b"1\r\na\r\n0\r\nchecksum: 1\r\n\r\n", 200, b"a", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", True),
        (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n", 304, b"", True),
        (OK + b"connection: close\r\ncontent-length: 1\r\n\r\na", 200, b"a", False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 1\r\n\r\na", 200, b"a", False),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + SIZED + b"ab", 200, b"ab", True),
        (b"HTTP/1.1 503 \r\ncontent-length: 1\r\n\r\na", 503, b"a", True),
    ],
)
def test_an_answer_is_whole_however_it_is_cut(answer: bytes, status: int, body: bytes, kept: bool) -> None:
    for size in (1, 3, len(answer)):
        connection, transport, taker = asked()
        for i in range(0, len(answer), size):
            assert taker.ends == []
            connection.data_received(answer[i : i + size])
        assert (taker.status, taker.body, taker.ends) == (status, body, [None])
        assert b"link" not in dict(taker.headers)
        assert b"checksum" not in dict(taker.headers)
        assert (connection.usable, transport.closed) == (kept, not kept)


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\n\r\n", OK + b"transfer-encoding: gzip\r\n\r\n"])
def test_a_body_of_no_announced_length_ends_with_its_connection(head: bytes) -> None:
    connection, _, taker = asked()
    for data in (head, b"ab", b"c"):
        connection.data_received(data)
    assert taker.ends == []
    connection.connection_lost(None)
    assert (taker.body, taker.ends) == (b"abc", [None])
    connection, _, taker = asked()
    connection.data_received(head + b"ab")
    connection.connection_lost(ConnectionResetError("reset"))
    [error] = taker.ends
    assert isinstance(error, ConnectionGone)


def test_header_values_are_bytes_without_the_space_around_them() -> None:
    connection, _, taker = asked()
    connection.data_received(OK + b"X-Request-Id: \xff\xc3\xa9 \r\nContent-Length: 0\r\n\r\n")
    assert taker.headers == [(b"x-request-id", b"\xff\xc3\xa9"), (b"content-length", b"0")]


@pytest.mark.parametrize("begun", [b"", b"HTTP/1.1 2", SIZED + b"a", CHUNKED + b"5\r\nab", CHUNKED + b"2\r\nab\r\n"])
def test_an_answer_that_breaks_off_is_reported_with_how_far_it_got(begun: bytes) -> None:
    connection, _, taker = asked()
    if begun:
        connection.data_received(begun)
    connection.connection_lost(None)
    [error] = taker.ends
    assert isinstance(error, ConnectionGone)
    assert error.untouched == (not begun)
    assert ("before" if not begun else "within") in str(error)
    assert not connection.usable


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-x\r\n\r\n",
        OK + b"content-length: 1\r\ncontent-length: 2\r\n\r\n",
        OK + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
        CHUNKED + b"zz\r\n",
        OK + b"a: b\r\n" * (MAX_HEADERS + 1) + b"\r\n",
        OK + b"a: " + b"b" * MAX_HEAD_BYTES + b"\r\n\r\n",
    ],
)
def test_what_is_no_answer_ends_the_connection(answer: bytes) -> None:
    connection, transport, taker = asked()
    connection.data_received(answer)
    [error] = taker.ends
    assert isinstance(error, BadAnswer)
    assert transport.closed
    connection.connection_lost(None)
    assert len(taker.ends) == 1


@pytest.mark.parametrize("begun", [OK + b"a: ", CHUNKED + b"1;", CHUNKED + b"1\r\na\r\n0\r\nx: "])
def test_a_head_without_an_end_is_not_gathered_for_ever(begun: bytes) -> None:
    connection, transport, taker = asked()
    connection.data_received(begun)
    fed = 0
    while not taker.ends:
        connection.data_received(b"b" * 1000)
        fed += 1000
        assert fed <= MAX_HEAD_BYTES + 1000
    assert isinstance(taker.ends[0], BadAnswer)
    assert transport.closed


def test_a_long_body_is_no_long_head() -> None:
    connection, _, taker = asked()
    connection.data_received(OK + b"content-length: %d\r\n\r\n" % (9 * MAX_HEAD_BYTES))
    for _ in range(9):
        connection.data_received(b"x" * MAX_HEAD_BYTES)
    assert (len(taker.body), taker.ends) == (9 * MAX_HEAD_BYTES, [None])


@pytest.mark.parametrize("surplus", [b"x", SIZED + b"cd", b"HTTP/1.1"])
def test_more_than_was_asked_for_is_no_answer(surplus: bytes) -> None:
    for at_once in (True, False):
        connection, transport, taker = asked()
        if at_once:
            connection.data_received(SIZED + b"ab" + surplus)
        else:
            connection.data_received(SIZED + b"ab")
            assert connection.usable
            connection.data_received(surplus)
        assert (taker.body, taker.ends) == (b"ab", [None])
        assert transport.closed
        assert not connection.usable


def test_an_answer_before_the_request_is_sent_leaves_no_usable_connection() -> None:
    connection, transport, taker = asked()
    transport.unsent = 1
    connection.data_received(SIZED + b"ab")
    assert (taker.ends, transport.closed) == ([None], True)


def test_a_connection_serves_one_request_after_the_other() -> None:
    connection, transport, first = asked()
    connection.data_received(CHUNKED + b"1\r\na\r\n0\r\n\r\n")
    second = Taker()
    connection.ask([b"next"], second)
    assert transport.sent.endswith(b"next")
    connection.data_received(SIZED + b"cd")
    assert (first.body, second.body, first.ends, second.ends) == (b"a", b"cd", [None], [None])


def test_a_dropped_answer_is_heard_of_no_more() -> None:
    connection, transport, taker = asked()
    connection.data_received(CHUNKED + b"1\r\na\r\n")
    connection.close()
    connection.data_received(b"1\r\nb\r\n")
    connection.connection_lost(None)
    assert (taker.body, taker.ends, transport.closed) == (b"a", [], True)


# --- what a task reads of it ---


def reading(given_back: list[Connection]) -> tuple[Connection, Transport, ClientResponse]:
    """Return a connection with an answer that has begun."""
    connection, transport = Connection(), Transport()
    connection.connection_made(transport)
    answer = ClientResponse(connection, lambda: given_back.append(connection), None)
    connection.ask([b"x"], answer)
    connection.data_received(CHUNKED)
    return connection, transport, answer


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def test_a_reader_gets_at_once_what_has_come() -> None:
    async def body() -> None:
        given_back: list[Connection] = []
        connection, _, answer = reading(given_back)
        assert (answer.status, answer.header(b"transfer-encoding"), answer.header(b"x")) == (200, b"chunked", None)
        connection.data_received(chunk(b"a") + chunk(b"b"))
        assert await answer.read() == b"ab"
        waiting = asyncio.create_task(answer.read())
        await asyncio.sleep(0)
        connection.data_received(chunk(b"c"))
        connection.data_received(chunk(b"d") + b"0\r\n\r\n")
        assert given_back == [connection]
        assert (await waiting, await answer.read(), await answer.read()) == (b"cd", b"", b"")
        answer.close()
        assert connection.usable

    asyncio.run(body())


def test_an_error_comes_behind_all_that_came_before_it() -> None:
    async def body() -> None:
        given_back: list[Connection] = []
        connection, _, answer = reading(given_back)
        connection.data_received(chunk(b"a"))
        connection.connection_lost(None)
        assert await answer.read() == b"a"
        for _ in range(2):
            with pytest.raises(ConnectionGone):
                await answer.read()
        assert given_back == []

    asyncio.run(body())


def test_nothing_more_is_read_while_the_reader_is_behind() -> None:
    async def body() -> None:
        connection, transport, answer = reading([])
        connection.data_received(chunk(b"x" * MAX_BUFFERED))
        assert transport.reading
        connection.data_received(chunk(b"y"))
        assert not transport.reading
        assert len(await answer.read()) == MAX_BUFFERED + 1
        assert transport.reading
        # A connection is never kept unread.
        connection.data_received(chunk(b"x" * (MAX_BUFFERED + 1)) + b"0\r\n\r\n")
        assert transport.reading
        assert connection.usable

    asyncio.run(body())


def test_a_pause_counts_until_the_reader_had_to_wait_for_the_server() -> None:
    async def body() -> None:
        connection, _, answer = reading([])
        for _ in range(2):
            connection.data_received(chunk(b"x" * (MAX_BUFFERED + 1)))
            await asyncio.sleep(3)
            await answer.read()
            waiting = asyncio.create_task(answer.read())
            await asyncio.sleep(0)
            connection.data_received(chunk(b"y"))  # as it may have lain in the kernel
            assert await waiting == b"y"
            await asyncio.sleep(20)
            assert answer.longest_pause == pytest.approx(3)
            waiting = asyncio.create_task(answer.read())
            await asyncio.sleep(1)
            connection.data_received(chunk(b"z"))
            assert await waiting == b"z"
            assert answer.longest_pause == 0

    run_jumping(body())


def test_a_reader_has_not_caught_up_before_it_has_read_what_the_kernel_holds() -> None:
    async def body() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        transport, connection = await asyncio.get_running_loop().create_connection(Connection, sock=ours)
        answer = ClientResponse(connection, lambda: None, None)
        connection.ask([b"x"], answer)
        theirs.send(CHUNKED)
        await answer.head()
        sent, piece = 0, chunk(b"x" * 1000) * 1000
        with contextlib.suppress(BlockingIOError):
            while True:
                sent += theirs.send(piece[sent % len(piece) :])
                await asyncio.sleep(0)
        await asyncio.sleep(3)
        theirs.close()
        with contextlib.suppress(ConnectionGone):
            while await answer.read():
                assert answer.longest_pause == pytest.approx(3)
                # What other tasks need does not count as a wait for the server.
                asyncio.get_running_loop()._jump(1.0)  # type: ignore[attr-defined]
            pytest.fail("the answer ended")
        assert answer.longest_pause >= 3
        transport.close()

    run_jumping(body())


def test_a_late_timer_is_no_sign_that_a_reader_has_caught_up() -> None:
    """uvloop calls timers that are due before it asks the sockets again."""

    class Stall(asyncio.Protocol):
        """Lets the timer become due, while data arrives that the loop sees only later."""

        def data_received(self, data: bytes) -> None:
            due = time.monotonic() + 2 * CATCH_UP_SECONDS
            while time.monotonic() < due:
                pass
            theirs.send(chunk(b"z"))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        transport, connection = await loop.create_connection(Connection, sock=ours)
        stall, _ = await loop.create_connection(Stall, sock=stalled)
        try:
            await check(connection)
        finally:
            transport.abort()
            stall.abort()
            # They close in the next turns of the loop.
            for _ in range(3):
                await asyncio.sleep(0)

    async def check(connection: Connection) -> None:
        answer = ClientResponse(connection, lambda: None, None)
        connection.ask([b"x"], answer)
        theirs.send(CHUNKED)
        await answer.head()
        connection.data_received(chunk(b"x" * (MAX_BUFFERED + 1)))
        while not answer.longest_pause:
            await asyncio.sleep(0)
        await answer.read()
        paused = answer.longest_pause
        waiting = asyncio.create_task(answer.read())
        await asyncio.sleep(0)
        stalls.send(b"x")
        assert await waiting == b"z"
        assert answer.longest_pause == paused
        # Without data, it has caught up.
        waiting = asyncio.create_task(answer.read())
        while answer.longest_pause:
            await asyncio.sleep(0)
        waiting.cancel()

    with contextlib.ExitStack() as stack:
        ours, theirs, stalled, stalls = (stack.enter_context(s) for _ in range(2) for s in socket.socketpair())
        for one in (ours, theirs, stalled, stalls):
            one.setblocking(False)
        uvloop.run(main())


def test_the_longest_time_without_reading_is_known() -> None:
    async def body() -> None:
        connection, _, answer = reading([])
        connection.data_received(chunk(b"x" * MAX_BUFFERED))
        await asyncio.sleep(5)
        assert answer.longest_pause == 0
        for pause, longest in ((3.0, 3.0), (7.0, 7.0), (2.0, 7.0)):
            connection.data_received(chunk(b"y" * MAX_BUFFERED))
            await asyncio.sleep(pause / 2)
            connection.data_received(chunk(b"y"))  # as it may on its way into a pause
            await asyncio.sleep(pause / 2)
            assert answer.longest_pause == pytest.approx(longest)
            await answer.read()
            await asyncio.sleep(20)  # nothing comes
            assert answer.longest_pause == pytest.approx(longest)
            connection.data_received(chunk(b"x"))

    run_jumping(body())


def test_a_body_is_read_whole_up_to_a_limit() -> None:
    async def body() -> None:
        for limit, too_much in ((None, False), (5, False), (4, True)):
            connection, _, answer = reading([])
            connection.data_received(chunk(b"abc") + chunk(b"de") + b"0\r\n\r\n")
            if too_much:
                with pytest.raises(BadAnswer, match="more than 4 bytes"):
                    await answer.read_all(limit)
            else:
                assert await answer.read_all(limit) == b"abcde"

    asyncio.run(body())


def test_what_was_closed_is_not_read_as_if_it_were_whole() -> None:
    async def body() -> None:
        _, transport, answer = reading([])
        answer.close()
        assert transport.closed
        with pytest.raises(ClientError, match="dropped"):
            await answer.read()

    asyncio.run(body())
