"""Starts the routers that are compared, each on a core of its own."""

from __future__ import annotations

import contextlib
import http.client
import os
import subprocess
import time
from collections.abc import Iterator, Sequence

import orjson

from pdserve.benchmark.errors import ServerError
from pdserve.runtime.python import python_command
from pdserve.runtime.web.ports import free_ports

from ..servers.child_processes import stop
from .client import ask

OURS = "pdserve"
READY_SECONDS = 60.0
STOP_SECONDS = 10.0


@contextlib.contextmanager
def running(name: str, command: Sequence[str], worker: str, core: int) -> Iterator[tuple[int, int]]:
    """Run a router on ``core`` within the ``with`` block. Yield its port and pid once it serves.

    ``command``: its words, with ``{port}`` and ``{worker}`` to replace. ``worker``: URL of the instance. Raises
    ``ServerError``.
    """
    [port] = free_ports(1)
    words = [word.replace("{port}", str(port)).replace("{worker}", worker) for word in command]
    options = None
    if name == OURS:
        words = python_command("-m", "pdserve.server.child_server", str(os.getpid()))
        given = {"worker": [worker], "port": port, "log_level": "warning"}
        options = orjson.dumps({"command": "router", "options": given})
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})  # inherited
    try:
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    finally:
        os.sched_setaffinity(0, mine)
    assert process.stdin is not None
    process.stdin.write(options or b"")
    process.stdin.close()
    try:
        wait_serving(process, port)
        yield port, process.pid
    finally:
        stop(process, STOP_SECONDS)


def wait_serving(process: subprocess.Popen[bytes], port: int) -> None:
    """Wait until a request through the router is answered.

    Raises ``ServerError`` after ``READY_SECONDS`` or its end.
    """
    head, _, body = ask(1).partition(b"\r\n\r\n")
    path = head.split(b" ")[1].decode()
    deadline = time.monotonic() + READY_SECONDS
    last = "nothing"
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerError(f"it ended with status {process.returncode} while starting")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("POST", path, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
            if answer.status == http.client.OK and b"data: " in content:
                return
            last = f"{answer.status}: {content[:200].decode(errors='replace')}"
        time.sleep(0.1)
    raise ServerError(f"it does not serve after {READY_SECONDS:.0f} s; it said {last}")
