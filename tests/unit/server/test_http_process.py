"""The HTTP process itself, started as the supervisor starts it; the test plays the rest of the ring."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import zmq
from support.machine import limit

from pdserve.messages.channel import Receiver, Sender, ipc_address
from pdserve.messages.control import Ready, StopAsked
from pdserve.messages.outputs import FinishReason, FinishType, ReqMeta, ReqText, TextBatch, Timing
from pdserve.messages.requests import TokenizeReq
from pdserve.messages.routes import ToSupervisor, ToTokenizer
from pdserve.runtime.child import ChildSpec
from pdserve.runtime.signals import STOP
from pdserve.runtime.web.own_admin_key import draw_own_admin_key
from pdserve.server.options import ServerOptions

TIMEOUT_MS = 30_000


class Ring:
    """The channels of an instance. This test plays its other processes."""

    def __init__(self, run_dir: Path, port: int) -> None:
        self.ctx: zmq.Context[Any] = zmq.Context()
        self.supervisor: Receiver[Any] = Receiver(self.ctx, ipc_address(run_dir, "supervisor"), ToSupervisor)
        self.tokenizer: Receiver[Any] = Receiver(self.ctx, ipc_address(run_dir, "tokenizer"), ToTokenizer)
        self.http = Sender(self.ctx, ipc_address(run_dir, "http"))
        self.raw_http = self.ctx.socket(zmq.PUSH)
        self.raw_http.connect(ipc_address(run_dir, "http"))
        self.url = f"http://127.0.0.1:{port}"
        spec = ChildSpec("http", str(run_dir), "e1", os.getpid(), ServerOptions(port=port), "secret")
        spec_file = run_dir / "http.json"
        spec_file.write_bytes(msgspec.json.encode(spec))
        argv = [sys.executable, "-m", "pdserve.server.http_process", str(spec_file)]
        self.process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)

    def next_request(self) -> TokenizeReq:
        """Return the next request that HTTP sends to the tokenizer."""
        [request] = self.tokenizer.recv(TIMEOUT_MS)
        assert isinstance(request, TokenizeReq)
        return request

    def close(self) -> None:
        """End the process and the channels."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        self.ctx.destroy(linger=0)


@contextmanager
def ring(run_dir: Path, port: int) -> Iterator[Ring]:
    """Make a ring that is closed again."""
    it = Ring(run_dir, port)
    try:
        yield it
    finally:
        it.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_serves_survives_strange_frames_and_ends_when_told(tmp_path: Path) -> None:
    with ring(tmp_path, free_port()) as it, ThreadPoolExecutor() as pool, httpx.Client(timeout=limit(30)) as client:
        [ready] = it.supervisor.recv(TIMEOUT_MS)
        assert isinstance(ready, Ready)
        answer = pool.submit(client.post, it.url + "/generate", json={"text": "a"})
        request = it.next_request()
        it.raw_http.send(b"not a frame")
        it.raw_http.send(msgspec.msgpack.encode([{"type": "Reboot"}]))
        meta = ReqMeta(1, 1, 0, Timing())
        it.http.send(TextBatch([ReqText(request.rid, "b", [5], FinishReason(FinishType.LENGTH), meta)]))
        assert answer.result().json()["text"] == "b"

        waiting = pool.submit(client.post, it.url + "/generate", json={"text": "a"})
        it.next_request()
        it.process.terminate()  # what systemd sends to every process: only the supervisor acts on it
        it.process.send_signal(STOP)
        assert waiting.result().status_code == 503
        _, log = it.process.communicate(timeout=limit(30))
        assert it.process.returncode == 0
        assert log.count("dropped a frame") == 2
        assert "Traceback" not in log


def test_only_the_user_who_runs_it_can_end_it(tmp_path: Path) -> None:
    """A client that reaches the port can't: the key of such orders is in a file that others can't read."""
    draw_own_admin_key(ServerOptions(), tmp_path)
    key = (tmp_path / "admin-key").read_text().strip()
    with ring(tmp_path, free_port()) as it, httpx.Client(timeout=limit(30)) as client:
        it.supervisor.recv(TIMEOUT_MS)
        assert client.post(it.url + "/drain").status_code == 401
        assert client.post(it.url + "/drain", headers={"authorization": f"Bearer {key}"}).status_code == 200
        [asked] = it.supervisor.recv(TIMEOUT_MS)
        assert isinstance(asked, StopAsked)


def test_a_port_in_use_ends_it_with_a_clear_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with ring(tmp_path, port) as it:
            _, log = it.process.communicate(timeout=limit(30))
            assert it.process.returncode == 1
            assert f"can't listen on 127.0.0.1:{port}" in log
            assert "Traceback" not in log
            assert it.supervisor.recv(0) == []


def test_does_not_load_the_scheduler() -> None:
    """``test_light_processes.py`` has the libraries that it does not load."""
    code = "import sys, pdserve.server.http_process; sys.exit('pdserve.scheduler.process' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_head_that_is_too_long_is_refused(tmp_path: Path) -> None:
    port = free_port()
    with ring(tmp_path, port) as it:
        it.supervisor.recv(TIMEOUT_MS)
        with socket.create_connection(("127.0.0.1", port), timeout=limit(10)) as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n")
            assert sock.recv(100).startswith(b"HTTP/1.1 431 ")
