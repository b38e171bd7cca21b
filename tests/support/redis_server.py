"""A Redis of the test's own, on a free port of the loopback interface, without a disk."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from .processes import free_ports, wait_until

SERVER = shutil.which("redis-server") or shutil.which("valkey-server")


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[str]:
    """Runs one; its URL. ``options``: more of its command line."""
    assert SERVER is not None
    [port] = free_ports(1)
    command = [SERVER, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder), *options]
    with (folder / "redis.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            client = redis.Redis(port=port)
            wait_until(lambda: _answers(client), 20, "redis-server answers")
            client.close()
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            server.kill()


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False
