"""The bootstrap server as a process, with the clients that the scheduler uses."""

from __future__ import annotations

import contextlib
import http.server
import os
import queue
import select
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
from support.forked import forks
from support.layouts import uniform_layout
from support.machine import limit

from pdserve.disaggregation.bootstrap.finder import RegistrationFinder
from pdserve.disaggregation.bootstrap.lease import LeaseKeeper
from pdserve.disaggregation.bootstrap.registration import MAX_REGISTRATION_BYTES, Reached, Registration
from pdserve.messages.channel import Receiver, ipc_address
from pdserve.messages.control import Ready
from pdserve.runtime.child import ChildSpec
from pdserve.runtime.signals import STOP
from pdserve.runtime.web.bounded_protocol import MAX_CONNECTIONS
from pdserve.server.options import ServerOptions

MODULE = "pdserve.disaggregation.bootstrap.server"
LAYOUT = uniform_layout(page_size=16, num_layers=2, kv_heads=1, head_dim=8, dtype="float32", page_bytes=4096)
LIMIT = limit(20.0)
SECRET = "known to this instance only"
OWN = {"Authorization": f"Bearer {SECRET}"}


def make_registration(epoch, ttl=30.0):
    return Registration(
        epoch=epoch, control_port=4000, fingerprint="f", layout=LAYOUT, backend="tcp", pool="p", ttl=ttl
    )


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def wait_until(condition):
    limit = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < limit
        threading.Event().wait(0.01)


def child_spec(run_dir, port):
    """Write what the supervisor would tell the process, and return the file's path."""
    options = ServerOptions(disaggregation_mode="prefill", disaggregation_bootstrap_port=port)
    spec = run_dir / "bootstrap.json"
    spec.write_bytes(msgspec.json.encode(ChildSpec("bootstrap", str(run_dir), "epoch", os.getpid(), options, SECRET)))
    return str(spec)


class Server:
    """A bootstrap process, ready."""

    def __init__(self, tmp_path, port):
        self.port = port
        self.url = f"http://127.0.0.1:{port}/registration"
        with zmq.Context() as ctx:
            ready = Receiver(ctx, ipc_address(tmp_path, "supervisor"), Ready)
            self.process = forks().start(MODULE, [child_spec(tmp_path, port)], sys.__stderr__.fileno())
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
    """Return a client with the headers of the instance's own processes."""
    with httpx.Client(trust_env=False, timeout=LIMIT, headers=OWN) as client:
        yield client


@pytest.fixture
def finder():
    answers = queue.Queue()
    finder = RegistrationFinder(lambda *answer: answers.put(answer), reach_seconds=0.5, patience=5.0)
    finder.answers = answers
    yield finder
    finder.stop()


def test_register_replace_withdraw_over_http(start, client):
    server = start()
    assert client.get(f"http://127.0.0.1:{server.port}/health").status_code == 200
    answer = client.get(server.url)
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    assert "not registered yet" in answer.json()["error"]

    a, b = make_registration("a"), make_registration("b")
    assert client.put(server.url, content=msgspec.json.encode(a)).status_code == 204
    assert msgspec.json.decode(client.get(server.url).content, type=Registration) == a
    assert client.put(server.url, content=msgspec.json.encode(b)).status_code == 204
    assert client.put(server.url, content=msgspec.json.encode(a)).status_code == 409
    assert client.delete(server.url, params={"epoch": "x"}).status_code == 409
    assert client.delete(server.url).status_code == 400
    assert client.delete(server.url, params={"epoch": "b"}).status_code == 204
    assert "draining" in client.get(server.url).json()["error"]

    assert client.put(server.url, content=b"{").status_code == 400
    assert client.put(server.url, content=b" " * (MAX_REGISTRATION_BYTES + 1)).status_code == 413
    assert client.get(f"http://127.0.0.1:{server.port}/docs").status_code == 404


def test_a_lease_runs_out(start, client):
    server = start()
    assert client.put(server.url, content=msgspec.json.encode(make_registration("a", ttl=0.05))).status_code == 204
    wait_until(lambda: client.get(server.url).status_code == 503)
    assert "ran out" in client.get(server.url).json()["error"]


def test_the_supervisor_ends_it_with_exit_code_0_and_signals_from_outside_do_not(start, client):
    server = start()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        server.process.send_signal(number)
    assert client.get(server.url).status_code == 503
    server.process.send_signal(STOP)
    assert server.process.wait(LIMIT) == 0


def test_a_taken_port_says_what_to_do(tmp_path):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        command = [sys.executable, "-m", MODULE, child_spec(tmp_path, sock.getsockname()[1])]
        result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert result.returncode == 1
    assert "--disaggregation-bootstrap-port" in result.stderr


def test_fetcher_waits_for_a_prefill_that_is_starting(start, finder):
    server = start()
    finder.find("127.0.0.1", server.port)
    keeper = LeaseKeeper(make_registration("a"), "127.0.0.1", lambda: server.port, SECRET)
    keeper.start()
    assert finder.answers.get(timeout=LIMIT) == (
        "127.0.0.1",
        server.port,
        Reached(make_registration("a"), "127.0.0.1"),
    )
    with httpx.Client(trust_env=False) as client:
        keeper.pause()
        wait_until(lambda: "memory was given back" in client.get(server.url).text)
        assert keeper.lost(time.monotonic() + 3600) is None
        keeper.change(make_registration("a"))
        wait_until(lambda: client.get(server.url).status_code == 200)
    keeper.withdraw()
    assert keeper.join(LIMIT)
    with httpx.Client(trust_env=False) as client:
        assert "draining" in client.get(server.url).json()["error"]


def test_fetcher_gives_up_soon_without_an_answer_and_one_silent_host_holds_up_no_other(start, finder):
    server = start()
    with httpx.Client(trust_env=False, headers=OWN) as client:
        client.put(server.url, content=msgspec.json.encode(make_registration("a")))
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        nobody = free_port()
        for host, port in (("127.0.0.1", silent.getsockname()[1]), ("127.0.0.1", nobody), ("127.0.0.1", server.port)):
            finder.find(host, port)
        first = finder.answers.get(timeout=LIMIT)
        assert first[1:] == (server.port, Reached(make_registration("a"), "127.0.0.1"))
        for _ in range(2):
            answer = finder.answers.get(timeout=LIMIT)[2]
            assert "does not answer" in answer


def test_fetcher_says_which_address_answered_to_a_name(start, finder):
    server = start()
    with httpx.Client(trust_env=False, headers=OWN) as client:
        client.put(server.url, content=msgspec.json.encode(make_registration("a")))
    finder.find("localhost", server.port)
    assert finder.answers.get(timeout=LIMIT)[2] == Reached(make_registration("a"), "127.0.0.1")


@pytest.mark.parametrize("host", ["a..b", "no such host", "x" * 300, ""])
def test_fetcher_answers_for_hosts_that_cannot_be(finder, host):
    finder.find(host, 1)
    answer = finder.answers.get(timeout=LIMIT)
    assert answer[:2] == (host, 1)
    assert isinstance(answer[2], str)


def test_keeper_registers_again_with_a_bootstrap_server_that_restarted(start, client):
    server = start()
    keeper = LeaseKeeper(make_registration("a", ttl=0.6), "127.0.0.1", lambda: server.port, SECRET)
    keeper.start()
    wait_until(lambda: client.get(server.url).status_code == 200)
    server.stop()
    server = start(server.port)
    wait_until(lambda: client.get(server.url).status_code == 200)
    keeper.stop()
    assert keeper.join(LIMIT)
    wait_until(lambda: client.get(server.url).status_code == 503)  # the lease was not withdrawn: it ran out


@pytest.mark.parametrize(
    "authorization", [None, "", "Bearer", "Bearer wrong", f"Basic {SECRET}", SECRET, "Bearer \xff"]
)
def test_a_stranger_neither_takes_the_route_nor_withdraws_it(start, client, authorization):
    server = start()
    registration = msgspec.json.encode(make_registration("a"))
    assert client.put(server.url, content=registration).status_code == 204
    headers = {} if authorization is None else {b"Authorization": authorization.encode("latin-1")}
    with httpx.Client(trust_env=False, timeout=LIMIT) as stranger:
        forged = msgspec.json.encode(make_registration("mine"))
        for answer in (
            stranger.put(server.url, content=forged, headers=headers),
            stranger.put(server.url, content=registration, headers=headers),  # replayed
            stranger.delete(server.url, params={"epoch": "a"}, headers=headers),
        ):
            assert answer.status_code == 401
            assert "only the instance" in answer.json()["error"]
        assert stranger.get(server.url).json()["epoch"] == "a"


def test_keeper_takes_a_lost_lease_again_and_says_meanwhile_that_it_is_lost(start, client):
    server = start()
    keeper = LeaseKeeper(make_registration("a", ttl=0.3), "127.0.0.1", lambda: server.port, SECRET)
    keeper.start()
    wait_until(lambda: client.get(server.url).status_code == 200)
    # On a busy machine a renewal may come after the lease, and the registration counts as lost for that reason first.
    wait_until(lambda: keeper.lost(time.monotonic()) is None)
    client.put(server.url, content=msgspec.json.encode(make_registration("b")))
    wait_until(lambda: "replaced by a newer instance" in (keeper.lost(time.monotonic()) or ""))
    server.stop()
    start(server.port)  # it remembers nothing, so no epoch is over
    wait_until(lambda: client.get(server.url).json().get("epoch") == "a")
    wait_until(lambda: keeper.lost(time.monotonic()) is None)
    keeper.stop()
    assert keeper.join(LIMIT)


@pytest.mark.parametrize("status", [500, 401, 404, 409])
def test_no_status_ends_the_keeper_and_an_outage_is_logged_once(caplog, status):
    """A bootstrap server that refuses five times, then takes the registration."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_PUT(self):
            asked.append(self.headers["Authorization"])
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status if len(asked) <= 5 else 204)
            self.end_headers()

        def log_message(self, *args):
            pass

    caplog.set_level("INFO")
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        keeper = LeaseKeeper(make_registration("a", ttl=0.15), "127.0.0.1", lambda: server.server_port, SECRET)
        keeper.start()
        # Before the first answer the registration counts as lost as well, without a known reason.
        wait_until(lambda: f"HTTP status {status}" in (keeper.lost(time.monotonic()) or ""))
        wait_until(lambda: keeper.lost(time.monotonic()) is None and len(asked) > 6)
        keeper.stop()
        assert keeper.join(LIMIT)
        server.shutdown()
        thread.join()
    assert set(asked) == {f"Bearer {SECRET}"}
    lines = [r.getMessage() for r in caplog.records if r.name.endswith(".lease")]
    assert len(lines) == 2
    assert "refused the registration" in lines[0]
    assert "again" in lines[1]


def test_idle_and_slow_strangers_hold_no_connection_and_lock_no_peer_out(start, client):
    server = start()
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(320)]
        for sock in idle[::2]:
            sock.sendall(b"GET /registration HTTP/1.1\r\nX-Slow: ")
        assert client.get(server.url).status_code == 503  # answered, and there is no registration yet

        def open_ones():
            ready, _, _ = select.select(idle, [], [], 0)
            return len(idle) - len(ready)

        wait_until(lambda: open_ones() <= MAX_CONNECTIONS)
        wait_until(lambda: open_ones() == 0)  # after REQUEST_SECONDS


def test_a_head_without_end_is_refused(start):
    server = start()
    with socket.create_connection(("127.0.0.1", server.port), LIMIT) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(b"GET /registration HTTP/1.1\r\n" + b"X-Long: %b\r\n" % (b"x" * 1000) * 100)
        with contextlib.suppress(ConnectionError):
            assert sock.recv(100).split(b" ")[1:2] in ([b"400"], [])
