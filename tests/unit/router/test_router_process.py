"""The router as an OS process: its title, its end, and what it does not load."""

import json
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from support.machine import limit
from support.processes import wait_until

from pdserve.runtime.signals import STOP

RUN = """
import sys
from pdserve.router.options import RouterOptions
from pdserve.router.process import run_router
secret = sys.argv[2] if sys.argv[2:] else None
code = run_router(RouterOptions(worker=["http://127.0.0.1:9"], port=int(sys.argv[1]), cluster_secret_file=secret))
assert "torch" not in sys.modules
print("exit", code, flush=True)
"""


@pytest.fixture
def port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextmanager
def start(port, *secret):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", RUN, str(port), *secret], **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def listens(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=limit(1)).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_exit_code_0(port, number):
    with start(port) as process:
        assert any("is unhealthy" in line for line in process.stderr)
        assert psutil.Process(process.pid).cmdline()[0] == f"pdserve router:{port}"
        process.send_signal(number)
        out, err = process.communicate(timeout=limit(20))
    assert (out, process.returncode) == ("exit 0\n", 0), err


def test_with_a_cluster_secret_it_draws_an_admin_key_which_goes_when_it_ends(port, tmp_path):
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("a-secret-of-thirty-two-characters")
    with start(port, str(secret)) as process:
        [file] = re.findall(r"need the key in (/\S+/admin-key)", process.stderr.readline())
        assert Path(file).stat().st_mode & 0o777 == 0o600
        assert Path(file).parent.stat().st_mode & 0o777 == 0o700
        assert any("is unhealthy" in line for line in process.stderr)  # it serves, and knows signals
        process.send_signal(STOP)
        out, err = process.communicate(timeout=limit(20))
    assert (out, Path(file).parent.exists()) == ("exit 0\n", False), err


def test_a_head_that_is_too_long_is_refused(port):
    with start(port) as process:
        # The first health check may be logged before the port is bound.
        wait_until(lambda: listens(port), 20, "the router listens")
        with socket.create_connection(("127.0.0.1", port), timeout=limit(10)) as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n")
            assert sock.recv(100).startswith(b"HTTP/1.1 431 ")
        process.terminate()
        process.communicate(timeout=limit(20))


def test_a_port_that_is_taken_is_an_error_that_names_it(port):
    with socket.create_server(("127.0.0.1", port)), start(port) as process:
        out, err = process.communicate(timeout=limit(20))
    assert out == "exit 1\n"
    assert str(port) in err


def test_it_dies_with_the_parent_that_it_is_tied_to(port):
    options = {"worker": ["http://127.0.0.1:9"], "port": port}
    command = json.dumps({"command": "router", "options": options})
    code = (
        "import os, subprocess, sys\n"
        "argv = [sys.executable, '-m', 'pdserve.server.child_server', str(os.getpid())]\n"
        "child = subprocess.Popen(argv, stdin=subprocess.PIPE, stderr=sys.stdout)\n"
        "child.stdin.write(sys.argv[1].encode())\n"
        "child.stdin.close()\n"
        "print(child.pid, flush=True)\n"
        "sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code, command], **pipes) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        assert any("is unhealthy" in line for line in parent.stdout)
        parent.kill()
        _, alive = psutil.wait_procs([child], timeout=limit(10))
    assert not alive
