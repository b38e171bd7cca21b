"""The bootstrap server as a process, with the clients that the scheduler uses."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import msgspec
import pytest
import zmq
from support.machine import limit

from pdserve.disaggregation.bootstrap import MAX_ROUTE_BYTES, Route
from pdserve.disaggregation.bootstrap_client import LeaseKeeper, RouteFetcher
from pdserve.messages.channel import Receiver, ipc_address
from pdserve.messages.control import Ready
from pdserve.messages.worker import KVLayout
from pdserve.server.child import ChildSpec
from pdserve.server.options import ServerOptions

LAYOUT = KVLayout(page_size=16, num_layers=2, kv_heads=1, head_dim=8, dtype="float32", page_bytes=4096)
LIMIT = limit(20.0)


def make_route(epoch, ttl=30.0):
    return Route(epoch=epoch, control_port=4000, fingerprint="f", layout=LAYOUT, backend="tcp", ttl=ttl)


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def wait_until(condition):
    limit = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < limit
        threading.Event().wait(0.01)


def child_command(run_dir, port):
    """What the supervisor would start."""
    options = ServerOptions(disaggregation_mode="prefill", disaggregation_bootstrap_port=port)
    spec = run_dir / "bootstrap.json"
    spec.write_bytes(msgspec.json.encode(ChildSpec("bootstrap", str(run_dir), "epoch", os.getpid(), options)))
    return [sys.executable, "-m", "pdserve.disaggregation.bootstrap_process", str(spec)]


class Server:
    """A bootstrap process, ready."""

    def __init__(self, tmp_path, port):
        self.port = port
        self.url = f"http://127.0.0.1:{port}/route"
        with zmq.Context() as ctx:
            ready = Receiver(ctx, ipc_address(tmp_path, "supervisor"), Ready)
            self.process = subprocess.Popen(child_command(tmp_path, port))
            try:
                assert [message.name for message in ready.recv(int(LIMIT * 1000))] == ["bootstrap"]
            finally:
                ready.close()

    def stop(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start(tmp_path):
    servers = []

    def make(port=None):
        servers.append(Server(tmp_path, port or free_port()))
        return servers[-1]

    yield make
    for server in servers:
        server.stop()


@pytest.fixture
def client():
    with httpx.Client(trust_env=False, timeout=LIMIT) as client:
        yield client


@pytest.fixture
def fetcher():
    answers = queue.Queue()
    fetcher = RouteFetcher(lambda *answer: answers.put(answer), reach_seconds=0.5, patience=5.0)
    fetcher.answers = answers
    yield fetcher
    fetcher.stop()


def test_register_replace_withdraw_over_http(start, client):
    server = start()
    assert client.get(f"http://127.0.0.1:{server.port}/health").status_code == 200
    answer = client.get(server.url)
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    assert "not registered yet" in answer.json()["error"]

    a, b = make_route("a"), make_route("b")
    assert client.put(server.url, content=msgspec.json.encode(a)).status_code == 204
    assert msgspec.json.decode(client.get(server.url).content, type=Route) == a
    assert client.put(server.url, content=msgspec.json.encode(b)).status_code == 204
    assert client.put(server.url, content=msgspec.json.encode(a)).status_code == 409
    assert client.delete(server.url, params={"epoch": "x"}).status_code == 409
    assert client.delete(server.url).status_code == 400
    assert client.delete(server.url, params={"epoch": "b"}).status_code == 204
    assert "draining" in client.get(server.url).json()["error"]

    assert client.put(server.url, content=b"{").status_code == 400
    assert client.put(server.url, content=b" " * (MAX_ROUTE_BYTES + 1)).status_code == 413
    assert client.get(f"http://127.0.0.1:{server.port}/docs").status_code == 404


def test_a_lease_runs_out(start, client):
    server = start()
    assert client.put(server.url, content=msgspec.json.encode(make_route("a", ttl=0.05))).status_code == 204
    wait_until(lambda: client.get(server.url).status_code == 503)
    assert "ran out" in client.get(server.url).json()["error"]


def test_sigterm_ends_it_with_exit_code_0_and_ctrl_c_does_not(start, client):
    server = start()
    server.process.send_signal(signal.SIGINT)
    assert client.get(server.url).status_code == 503
    server.process.terminate()
    assert server.process.wait(LIMIT) == 0


def test_a_taken_port_says_what_to_do(tmp_path):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        command = child_command(tmp_path, sock.getsockname()[1])
        result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert result.returncode == 1
    assert "--disaggregation-bootstrap-port" in result.stderr


def test_fetcher_waits_for_a_prefill_that_is_starting(start, fetcher):
    server = start()
    fetcher.fetch("127.0.0.1", server.port)
    keeper = LeaseKeeper(make_route("a"), "127.0.0.1", server.port)
    keeper.start()
    assert fetcher.answers.get(timeout=LIMIT) == ("127.0.0.1", server.port, make_route("a"))
    keeper.withdraw()
    assert keeper.join(LIMIT)
    with httpx.Client(trust_env=False) as client:
        assert "draining" in client.get(server.url).json()["error"]


def test_fetcher_gives_up_soon_where_nobody_answers_and_one_silent_host_holds_up_no_other(start, fetcher):
    server = start()
    with httpx.Client(trust_env=False) as client:
        client.put(server.url, content=msgspec.json.encode(make_route("a")))
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        began = time.monotonic()
        nobody = free_port()
        for host, port in (("127.0.0.1", silent.getsockname()[1]), ("127.0.0.1", nobody), ("127.0.0.1", server.port)):
            fetcher.fetch(host, port)
        first = fetcher.answers.get(timeout=LIMIT)
        assert first[1:] == (server.port, make_route("a"))
        for _ in range(2):
            answer = fetcher.answers.get(timeout=LIMIT)[2]
            assert "does not answer" in answer
        assert time.monotonic() - began < 5.0


@pytest.mark.parametrize("host", ["a..b", "no such host", "x" * 300, ""])
def test_fetcher_answers_for_hosts_that_cannot_be(fetcher, host):
    fetcher.fetch(host, 1)
    answer = fetcher.answers.get(timeout=LIMIT)
    assert answer[:2] == (host, 1)
    assert isinstance(answer[2], str)


def test_keeper_registers_again_with_a_bootstrap_server_that_restarted(start, client):
    server = start()
    keeper = LeaseKeeper(make_route("a", ttl=0.6), "127.0.0.1", server.port)
    keeper.start()
    wait_until(lambda: client.get(server.url).status_code == 200)
    server.stop()
    server = start(server.port)
    wait_until(lambda: client.get(server.url).status_code == 200)
    keeper.stop()
    assert keeper.join(LIMIT)
    wait_until(lambda: client.get(server.url).status_code == 503)  # the lease was not withdrawn: it ran out


def test_keeper_tells_when_another_instance_took_over(start, client):
    server = start()
    lost = queue.Queue()
    keeper = LeaseKeeper(make_route("a", ttl=0.3), "127.0.0.1", server.port, lost.put)
    keeper.start()
    wait_until(lambda: client.get(server.url).status_code == 200)
    client.put(server.url, content=msgspec.json.encode(make_route("b")))
    assert "replaced by a newer instance" in lost.get(timeout=LIMIT)
    assert keeper.join(LIMIT)
    assert client.get(server.url).json()["epoch"] == "b"
