"""Choice of the connections that end when there are too many."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable
from typing import Any

import httpx
import psutil
import pytest
import uvloop
from support.fake_engine import FakeEngine
from support.machine import limit
from support.served_app import serving

from pdserve.runtime.web import connections as module
from pdserve.runtime.web.connections import FEWEST, RESERVED_FILES, Connections, network_of


class Fake:
    def __init__(self, name: str, network: str) -> None:
        self.name, self.network, self.ended = name, network, False

    def end(self) -> None:
        self.ended = True


def opened(counted: Connections, names: str) -> dict[str, Fake]:
    """Open one connection for each name, from the network of its first letter."""
    fakes = {name: Fake(name, name[0]) for name in names.split()}
    for fake in fakes.values():
        counted.opened(fake)
    return fakes


def ended(fakes: dict[str, Fake]) -> list[str]:
    return [name for name, fake in fakes.items() if fake.ended]


def test_the_network_that_has_most_gives_the_place() -> None:
    counted = Connections(100, max_waiting=4)
    fakes = opened(counted, "b1 a1 a2 a3 a4 c1 a5")
    assert ended(fakes) == ["a1", "a2", "a3"]
    assert counted.waiting == 4


def test_open_files_limit_all_of_them_and_what_serves_is_not_ended() -> None:
    counted = Connections(4)
    fakes: dict[str, Fake] = {}
    for name in ("a1", "a2", "a3"):
        fakes |= opened(counted, name)
        counted.serve(fakes[name])
    fakes |= opened(counted, "a4 a5")
    assert ended(fakes) == ["a4"]
    counted.serve(fakes["a5"])
    fakes |= opened(counted, "b1")
    assert ended(fakes) == ["a4", "b1"]
    counted.closed(fakes["a1"])
    fakes |= opened(counted, "b2")
    assert ended(fakes) == ["a4", "b1"]


def test_a_process_keeps_files_for_what_serves_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    for files, most in ((RESERVED_FILES + 300, 100), (RESERVED_FILES, FEWEST), (RESERVED_FILES - 1, FEWEST)):
        monkeypatch.setattr(module.resource, "getrlimit", lambda which, files=files: (files, files))
        counted = Connections.of_process(files_each=3)
        fakes = [Fake(str(i), "a") for i in range(most + 1)]
        for fake in fakes[:most]:
            counted.opened(fake)
            counted.serve(fake)
        counted.opened(fakes[most])
        assert [fake.ended for fake in fakes] == [False] * most + [True]


def test_a_host_s_ipv6_addresses_are_one_network() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8:0:0:ffff::2") != network_of("2001:db8:0:1::1")
    assert network_of("192.0.2.1") != network_of("192.0.2.2")
    assert network_of("::ffff:192.0.2.1") == network_of("192.0.2.1") != network_of("::ffff:192.0.2.2")
    assert network_of("fe80::1%eth0") == network_of("fe80::2%eth0")
    assert network_of("no:address") == "no:address"


def test_the_log_says_so_a_few_times(caplog: pytest.LogCaptureFixture) -> None:
    counted = Connections(100, max_waiting=1)
    with caplog.at_level(logging.WARNING):
        opened(counted, " ".join(f"a{i}" for i in range(100)))
    assert 1 <= len(caplog.records) <= 20
    assert "one from a was ended: 1 wait for a request" in caplog.records[0].message


def test_a_server_full_of_half_sent_heads_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """20,000 of them, scaled to what a test may open."""
    counted = Connections(60, max_waiting=20, max_head_bytes=64 << 10)
    monkeypatch.setattr(module.Connections, "of_process", lambda files_each: counted)
    half = b"GET / HTTP/1.1\r\nhost: localhost\r\na: " + b"x" * 8000

    async def run() -> None:
        heads = []
        async with serving(FakeEngine()) as port, asyncio.timeout(limit(30)):
            for i in range(200):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                heads.append(writer)
                writer.write(half)
                await writer.drain()
                if i % 20 == 19:
                    async with httpx.AsyncClient(timeout=limit(10)) as client:
                        assert (await client.get(f"http://127.0.0.1:{port}/health")).status_code == 200
                    assert counted.waiting <= 20
                    assert 0 < counted.head_bytes <= 64 << 10
            for writer in heads:
                writer.close()

    asyncio.run(run())


LOOPS = pytest.mark.parametrize("run_loop", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


@pytest.fixture
def one_may_wait(monkeypatch: pytest.MonkeyPatch) -> Connections:
    """The connections of the next server, of which one may wait."""
    counted = Connections(60, max_waiting=1)
    monkeypatch.setattr(module.Connections, "of_process", lambda files_each: counted)
    return counted


@LOOPS
@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nhost: loc"], ids=["nothing", "half a head"])
def test_one_that_is_ended_is_told_why(
    one_may_wait: Connections, run_loop: Callable[[Any], None], sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with serving(FakeEngine()) as port, asyncio.timeout(limit(30)):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            await until(lambda: one_may_wait.head_bytes == len(sent) and one_may_wait.waiting == 1)
            _, other = await asyncio.open_connection("127.0.0.1", port)
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
            assert b"connection: close\r\n" in answer
            assert "too many connections" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
            for end in (writer, other):
                end.close()

    run_loop(run())


@LOOPS
def test_one_that_has_not_taken_its_answer_gives_its_descriptor_back_at_once(
    one_may_wait: Connections, run_loop: Callable[[Any], None]
) -> None:
    """Its server would wait for it much longer than this test does."""

    async def run() -> None:
        engine = FakeEngine(send_timeout=10_000.0)
        body = json.dumps({"text": "a", "sampling_params": {"max_new_tokens": 1}}).encode()
        make = engine.text
        engine.text = lambda request, _text, *rest, **more: make(request, "x" * 2**22, *rest, **more)  # type: ignore[method-assign]
        async with serving(engine) as port, asyncio.timeout(limit(30)):
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                sock.setblocking(False)
                loop = asyncio.get_running_loop()
                await loop.sock_connect(sock, ("127.0.0.1", port))
                head = b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
                await loop.sock_sendall(sock, head + body)
                await until(lambda: len(engine.requests) == 1 and one_may_wait.waiting == 1)
                assert has_descriptor(port, sock)
                _, other = await asyncio.open_connection("127.0.0.1", port)
                await until(lambda: not has_descriptor(port, sock))
                other.close()

    run_loop(run())


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0)


def has_descriptor(port: int, client: socket.socket) -> bool:
    """Return whether this process has the server's end of the connection that ``client`` is the other end of."""
    ends = psutil.Process().net_connections("tcp4")
    return any(end.laddr[1] == port and end.raddr == client.getsockname() for end in ends)
