"""Server processes of the check: started, asked, ended. Of the standard library, as a bare machine has it."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pdserve.runtime.python import python_command

START_SECONDS = 150.0
"""Limit of a server's start: a bare machine compiles the kernels that it needs."""


class ServerFailed(RuntimeError):
    """It did not start; the message is the end of its log."""


@contextmanager
def serve(args: Sequence[str], log: Path, seconds: float = START_SECONDS, command: str = "server") -> Iterator[str]:
    """Run ``pdserve server`` (or another ``command``) with ``args`` within the ``with`` block. Yield its base URL.

    ``seconds``: limit of its start. Raises ``ServerFailed`` if it does not become ready.
    """
    with serve_all([(args, log)], seconds, command) as [address]:
        yield address


@contextmanager
def serve_all(
    servers: Sequence[tuple[Sequence[str], Path]], seconds: float = START_SECONDS, command: str = "server"
) -> Iterator[list[str]]:
    """Run several servers within the ``with`` block, started at the same time. Yield their base URLs.

    ``servers``: arguments and log file of each. ``seconds``: limit of each wait. Raises ``ServerFailed``.
    """
    ports, processes = [], []
    for args, log in servers:
        ports.append(free_port())
        words = python_command("-m", "pdserve.server.cli", command, *args, "--port", str(ports[-1]))
        with log.open("wb") as file:
            processes.append(subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT))
    try:
        for process, port, (_, log) in zip(processes, ports, servers, strict=True):
            _wait_ready(process, port, log, seconds)
        yield [f"http://127.0.0.1:{port}" for port in ports]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_port() -> int:
    """Return a TCP port of the loopback address that no process listens on now. It is not reserved."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def generate(
    address: str, prompt: Sequence[int], length: int, sampling: dict[str, Any] | None = None, **more: Any
) -> list[int]:
    """Ask a server for ``length`` tokens after ``prompt`` and return their ids: greedy, or as ``sampling`` sets it.

    ``more``: further fields of the request.
    """
    sampling = {"temperature": 0.0, "max_new_tokens": length, "ignore_eos": True} | (sampling or {})
    body = {"input_ids": list(prompt), "sampling_params": sampling, **more}
    answer = ask(f"{address}/generate", body, 60.0)
    tokens: list[int] = answer["output_ids"]
    return tokens


def ask(url: str, body: Any = None, seconds: float = 5.0, headers: Mapping[str, str] | None = None) -> Any:
    """Send a GET request, or a POST request with ``body`` as JSON, and return the answer's JSON; None if it is empty.

    ``seconds``: its timeout. Raises ``urllib.error.URLError``.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})})
    with urllib.request.urlopen(request, timeout=seconds) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def _wait_ready(process: subprocess.Popen[bytes], port: int, log: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            ask(f"http://127.0.0.1:{port}/health")
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
        else:
            return
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    raise ServerFailed(" / ".join(lines[-2:])[-300:] or f"not ready within {seconds:.0f} s")
