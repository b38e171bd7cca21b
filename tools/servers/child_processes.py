"""Servers that a measurement starts: whether they are ready, and their end."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import httpx


def says_ok(client: httpx.Client, url: str) -> bool:
    """Return whether a server listens there and answers 200."""
    try:
        return client.get(url).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def stop(process: subprocess.Popen[bytes], seconds: float, kill: Callable[[], None] | None = None) -> None:
    """End a process, by force after ``seconds``: by ``kill``, or else by SIGKILL. Do nothing if it has ended."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        (kill or process.kill)()
        process.wait()
