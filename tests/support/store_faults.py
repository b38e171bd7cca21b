"""What may happen to a store of KV pages, on a folder and on a Redis that are really there.

Each kind begins at once, and returns what ends it. A folder lies on a file system of its own where the tests may mount
one: then its disk can be full.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .processes import freeze
from .redis_server import RedisServer

PREFIX = b"pdserve:kv:1:"
Heal = Callable[[], None]


def nothing() -> None:
    """Heal nothing: the fault passes by itself."""


def flipped(raw: bytes, rng: random.Random) -> bytes:
    """Flip one random bit of ``raw``."""
    at = rng.randrange(len(raw))
    return raw[:at] + bytes([raw[at] ^ 1 << rng.randrange(8)]) + raw[at + 1 :]


def truncated(raw: bytes, rng: random.Random) -> bytes:
    """Cut off the end of ``raw`` at a random place."""
    return raw[: rng.randrange(len(raw))]


class FolderFaults:
    """``folder``: the store's, within ``disk``, which is a mounted file system of its own or just a folder."""

    def __init__(self, disk: Path, *, mounted: bool) -> None:
        self.disk, self.folder = disk, disk / "kv"
        self.folder.mkdir(mode=0o700)
        self.args = ["file", str(self.folder)]
        self.kinds: dict[str, Callable[[random.Random], Heal]] = {
            "flipped": lambda rng: self._spoil(rng, lambda raw, _: flipped(raw, rng)),
            "truncated": lambda rng: self._spoil(rng, lambda raw, _: truncated(raw, rng)),
            "foreign": lambda rng: self._spoil(rng, lambda _, other: other),
            "a pipe": lambda rng: self._replace(rng, os.mkfifo),
            "a link": lambda rng: self._replace(rng, lambda path: path.symlink_to("/dev/zero")),
            "lost": self._lose,
            "gone": lambda _: self._move_away(),
        }
        self.dead = {"gone"}
        """Kinds of faults during which nothing can be written or read."""
        if mounted:
            self.kinds["full disk"] = lambda _: self._fill()

    def close(self) -> None:
        """Do nothing, since nothing runs."""

    def _pages(self, rng: random.Random) -> list[Path]:
        """Return a random half of the pages, or all."""
        pages = sorted(self.folder.rglob("*.page"))
        return [page for page in pages if rng.random() < 0.5] if rng.random() < 0.5 else pages

    def _spoil(self, rng: random.Random, change: Callable[[bytes, bytes], bytes]) -> Heal:
        pages = self._pages(rng)
        raw = {page: data for page in pages if (data := _read(page))}
        for page, data in raw.items():
            page.write_bytes(change(data, raw[rng.choice(list(raw))]))
        return nothing

    def _replace(self, rng: random.Random, make: Callable[[Path], None]) -> Heal:
        for page in self._pages(rng):
            # At once: the server may write a page again that it finds missing.
            strange = page.with_suffix(".strange")
            make(strange)
            strange.replace(page)
        return nothing

    def _lose(self, rng: random.Random) -> Heal:
        for page in self._pages(rng):
            page.unlink(missing_ok=True)
        return nothing

    def _move_away(self) -> Heal:
        away = self.disk / "elsewhere"
        self.folder.rename(away)
        return lambda: away.rename(self.folder) and None

    def _fill(self) -> Heal:
        ballast = self.disk / "ballast"
        state = os.statvfs(self.disk)
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, state.f_bavail * state.f_frsize))
        return ballast.unlink


class RedisFaults:
    """Faults of a Redis that belongs to the test."""

    def __init__(self, folder: Path) -> None:
        self.server = RedisServer(folder)
        self.server.start()
        self.args = ["redis", self.server.url]
        self.kinds: dict[str, Callable[[random.Random], Heal]] = {
            "flipped": lambda rng: self._spoil(lambda raw, _: flipped(raw, rng), rng),
            "truncated": lambda rng: self._spoil(lambda raw, _: truncated(raw, rng), rng),
            "foreign": lambda rng: self._spoil(lambda _, other: other, rng),
            "flushed": lambda _: self.server.client.flushall() and nothing,
            "killed, restarted": lambda _: self._kill(),
            "frozen": lambda _: self._freeze(),
            "full": lambda _: self._limit(),
            "asks for a password": lambda _: self._lock(),
        }
        self.dead = {"killed, restarted", "frozen", "asks for a password"}

    def close(self) -> None:
        """End it."""
        self.server.kill()
        self.server.client.close()

    def _spoil(self, change: Callable[[bytes, bytes], bytes], rng: random.Random) -> Heal:
        client = self.server.client
        raw = {key: value for key in sorted(client.keys(PREFIX + b"*")) if (value := client.get(key))}
        for key, value in raw.items():
            if rng.random() < 0.5:
                client.set(key, change(value, raw[rng.choice(list(raw))]))
        return nothing

    def _kill(self) -> Heal:
        self.server.kill()
        return self.server.start

    def _freeze(self) -> Heal:
        process = self.server.process
        assert process is not None
        freeze(process.pid)
        return lambda: process.send_signal(signal.SIGCONT)

    def _limit(self) -> Heal:
        self.server.client.config_set("maxmemory", "1mb")
        return lambda: self.server.client.config_set("maxmemory", "0") and None

    def _lock(self) -> Heal:
        # Existing connections stay open; those are the tests' own.
        client = self.server.client
        client.config_set("requirepass", "another")
        client.client_kill_filter(_type="normal", skipme=True)
        return lambda: client.config_set("requirepass", "") and None


@contextmanager
def small_disk(where: Path, megabytes: int) -> Iterator[bool]:
    """Mount a file system of that size at ``where``. If that is not permitted, make a folder and yield False."""
    where.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=0700", "tmpfs", str(where)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(where)], check=True)


def _read(page: Path) -> bytes:
    """Read a page; an absent file gives no bytes."""
    try:
        return page.read_bytes() if page.is_file() and not page.is_symlink() else b""
    except FileNotFoundError:
        return b""
