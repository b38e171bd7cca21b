"""What a router costs: the source of tokens, the client that times them, and all of it."""

from __future__ import annotations

import http.client
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from support.machine import limit

from pdserve.benchmark.errors import BenchOptionsError, ServerError
from tools.environment import environment
from tools.relay.__main__ import RelayOptions, keeps_up
from tools.relay.client import RelayClient, Seen, ask
from tools.relay.routers import running
from tools.relay.token_source import DONE, EVENT, PATH, token_source
from tools.servers.process_cpu import cpu_seconds_now

NOW = 1234.5


def test_a_source_gives_what_is_asked_for_at_its_pace() -> None:
    with token_source() as source:
        source.pace(0.05)
        connection = http.client.HTTPConnection("127.0.0.1", source.port, timeout=limit(20))
        with closing(connection):
            for tokens in (1, 4):
                body = ask(tokens).partition(b"\r\n\r\n")[2]
                connection.request("POST", PATH, body)
                answer = connection.getresponse().read()
                sent = [float(at) for at in re.findall(rb'"text":" ([0-9.]+)"', answer)]
                assert len(sent) == tokens
                assert answer.endswith(DONE)
                # The first comes at once. The others come with those of all streams,
                # of which one may be an interval late.
                assert tokens == 1 or sent[3] - sent[1] >= 0.05
                assert 0 <= time.perf_counter() - sent[-1] < limit(5)
            connection.request("GET", "/health")
            assert b"ready" in connection.getresponse().read()


@contextmanager
def server(pieces: list[bytes]) -> Iterator[int]:
    """Answers one connection with ``pieces``, each in a packet of its own, and closes it."""

    def serve() -> None:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection:
            connection.recv(65536)
            for piece in pieces:
                connection.sendall(piece)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


def read_to_the_end(client: RelayClient) -> Iterator[float]:
    client._open(client._port, ask(1))
    while True:
        for number, _ in client._epoll.poll(1.0):
            yield from client._read(number)


def test_events_are_counted_once_however_they_are_cut() -> None:
    whole = b"HTTP/1.1 200 OK\r\n\r\n" + 3 * (EVENT % NOW)
    for cut in range(1, len(whole), 41):
        with server([whole[:cut], whole[cut:]]) as port, closing(RelayClient(port)) as client:
            events = read_to_the_end(client)
            assert [next(events) for _ in range(3)] == [NOW] * 3
            with pytest.raises(ServerError, match="a stream ended"):
                next(events)


def test_a_refusal_is_reported() -> None:
    with server([b"HTTP/1.1 503 X\r\n\r\nbusy"]) as port, closing(RelayClient(port)) as client:
        streaming = client.streaming(1)
        with pytest.raises(ServerError, match="busy"):
            streaming.__enter__()


def test_keeping_up_is_all_events_before_the_next_ones() -> None:
    def seen(events: int, delay: float) -> Seen:
        return Seen(2.0, [delay] * events, {})

    assert keeps_up(seen(200, 0.019), 2, 0.02)
    assert not keeps_up(seen(200, 0.021), 2, 0.02)
    assert not keeps_up(seen(180, 0.019), 2, 0.02)


@pytest.mark.parametrize(
    "wrong", [{"streams": []}, {"streams": [0]}, {"seconds": 0.0}, {"interval_ms": 0.0}, {"command": ["smg --port 1"]}]
)
def test_options_that_measure_nothing_are_refused(wrong: dict) -> None:
    RelayOptions(command=["a=b {port}"]).check()
    with pytest.raises(BenchOptionsError):
        RelayOptions(**wrong).check()


def test_cpu_time_is_counted_with_that_of_children() -> None:
    burn = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\ninput()"
    parent = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert 0.2 <= cpu_seconds_now(child.pid) < 5
        child.communicate(b"\n")


def test_a_whole_measurement() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("the router needs a core of its own")
    argv = [sys.executable, "-P", "-m", "tools.relay", "--streams", "2", "--seconds", "0.5"]
    argv += ["--ladder-seconds", "0"]
    out = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=limit(60), env=environment())
    assert (out.returncode, out.stderr) == (0, "")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.stdout.splitlines() if "│" in line]
    assert [row[:2] for row in rows] == [["direct", "2"], ["pdserve", "2"]]
    assert float(rows[1][3]) > 0


def test_a_router_that_does_not_start_is_reported() -> None:
    with pytest.raises(ServerError, match="ended with status 1 while starting"):
        running("broken", ["false", "{port}"], "http://127.0.0.1:9", min(os.sched_getaffinity(0))).__enter__()
