"""What commands of measurements end with, and how they end what they started."""

from __future__ import annotations

import subprocess
import sys

import httpx
import pytest

from pdserve.benchmark.child_processes import says_ok, stop
from pdserve.benchmark.command import exit_code
from pdserve.benchmark.errors import BenchError, BenchOptionsError
from pdserve.runtime.exit_codes import EXIT_FAILED, EXIT_USAGE

DEAF = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); sys.stdin.read()"


def test_the_exit_code_says_what_went_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    def raises(error: Exception) -> None:
        raise error

    assert exit_code("x", lambda: None) == exit_code("x", lambda: True) == 0
    assert exit_code("x", lambda: False) == EXIT_FAILED
    assert exit_code("x", lambda: raises(BenchOptionsError("--n: too many"))) == EXIT_USAGE
    assert exit_code("x", lambda: raises(BenchError("it died"))) == EXIT_FAILED
    assert capsys.readouterr().err == "x: --n: too many\nx: it died\n"


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
