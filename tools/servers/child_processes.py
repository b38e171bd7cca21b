"""Servers that a measurement starts: whether they are ready, and their end."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import httpx


def says_ok(client: httpx.Client, url: str) -> bool:
    """Return whether ``GET url`` has status 200; False if no server can be reached."""
    try:
        return client.get(url).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def stop(process: subprocess.Popen[bytes], seconds: float, kill: Callable[[], None] | None = None) -> None:
    """Send SIGTERM to a process and wait for its end; after ``seconds`` end it by force. Do nothing if it has ended.

    ``kill``: the force, instead of SIGKILL to the process.
    """
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        (kill or process.kill)()
        process.wait()
