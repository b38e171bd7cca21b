"""Whether a server that a measurement starts is ready, and how it ends."""

from __future__ import annotations

import subprocess
import sys

import httpx
import pytest

from tools.servers.child_processes import says_ok, stop

DEAF = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); sys.stdin.read()"


@pytest.mark.parametrize(("script", "code"), [("import sys; print(flush=True); sys.stdin.read()", -15), (DEAF, -9)])
def test_what_does_not_end_is_killed(script: str, code: int) -> None:
    argv = [sys.executable, "-c", script]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it has begun
        stop(process, 0.2 if code == -9 else 60)
        assert process.returncode == code
        stop(process, 0.0)


def test_ready_is_who_answers_200() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/gone":
            raise httpx.ConnectError("nobody")
        return httpx.Response(200 if request.url.path == "/health" else 503)

    with httpx.Client(transport=httpx.MockTransport(answer), base_url="http://x") as client:
        assert [says_ok(client, path) for path in ("/health", "/busy", "/gone")] == [True, False, False]
