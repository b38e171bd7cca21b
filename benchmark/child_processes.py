"""Servers that a measurement starts: whether they are ready, and their end."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import httpx


def says_ok(client: httpx.Client, url: str) -> bool:
    """Whether somebody listens there, and answers 200."""
    try:
        return client.get(url).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def stop(process: subprocess.Popen[bytes], seconds: float, kill: Callable[[], None] | None = None) -> None:
    """End it, by force after so many seconds (``kill``: which; its own else); nothing where it has ended."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        (kill or process.kill)()
        process.wait()
