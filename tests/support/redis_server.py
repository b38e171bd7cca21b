"""A Redis of the test's own, on a free port of the loopback interface, without a disk."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from .orphans import end_with_this_process
from .processes import free_ports, wait_until

SERVER = shutil.which("redis-server") or shutil.which("valkey-server")


class RedisServer:
    """One that can be killed and started again on its port, where it has forgotten everything."""

    def __init__(self, folder: Path, *options: str) -> None:
        assert SERVER is not None
        [self.port] = free_ports(1)
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._log = folder / "redis.log"
        self._command = [SERVER, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
        self._command += options
        self.client = redis.Redis(port=self.port)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it answers."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)
        end_with_this_process(self.process.pid)
        wait_until(lambda: _answers(self.client), 20, "redis-server answers")

    def kill(self) -> None:
        """Returns when it is gone; nothing to do where it was not started."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[str]:
    """Runs one; its URL. ``options``: more of its command line."""
    server = RedisServer(folder, *options)
    try:
        server.start()
        yield server.url
    finally:
        server.kill()
        server.client.close()


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False
