"""What the campaign judges: answers that the attacker gets, and what the cluster's processes hold."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path

from support.machine import limit

from .cluster import Cluster, Usage

DOCUMENTED_5XX = frozenset({501, 503, 504, 507})
"""Statuses of docs/http-api.md that say no fault of the server's: switched off, overloaded, a limit of time or room."""
REPLACED = ("pdserve grammar check", "pdserve chat template")
"""Names of processes that end with a grammar or a conversation that took too much, and start with the next one."""
REPLACED_BYTES = 512 << 20
"""Maximum memory of such a process: its own, and the 256 MiB that a check may take."""
PEAK_BYTES = 768 << 20
"""Maximum growth of a process while it is attacked: 256 MiB of bodies that arrive, three times over while parsed."""
LEFT_BYTES = 128 << 20
"""Maximum growth of a process that is idle again: what allocators keep, and caches that are bounded."""
LEFT_DESCRIPTORS = 16
"""Maximum growth of a process's descriptors once the attacker has hung up: pooled connections to instances."""
KEPT = 12
MAX_FIELDS = 500
"""Maximum number of refused fields that are counted for one path. The attacker can invent names."""


class Violation(AssertionError):
    """Something that no attacker may bring about."""


@dataclass
class Record:
    """What the attacker sent and got. Any thread may use it. ``secrets``: bytes that it must never be sent."""

    secrets: list[bytes] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    paths: dict[str, Counter[int]] = field(default_factory=dict)
    """Statuses of answers, by method and path."""
    refused: dict[str, Counter[str]] = field(default_factory=dict)
    """Fields that errors named, by method and path: how many different checks refused something."""
    last: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT))
    violations: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def sent(self, kind: str, what: object) -> None:
        """Note an attack before it is made."""
        with self._lock:
            self.kinds[kind] += 1
            self.last.append(f"{kind}: {what!r:.600}")

    def got(self, kind: str, status: int, body: bytes, headers: bytes = b"") -> None:
        """Judge an answer."""
        with self._lock:
            self.statuses[str(status)] += 1
        if status >= 500 and status not in DOCUMENTED_5XX:
            self.violated(f"{kind}: status {status}: {body[:500]!r}")
        self.seen(kind, body)
        self.seen(kind, headers)

    def answered(self, path: str, status: int, refused: str) -> None:
        """Count an answer of a path. ``refused``: the field that its error names."""
        with self._lock:
            self.paths.setdefault(path, Counter())[status] += 1
            named = self.refused.setdefault(path, Counter())
            if len(named) < MAX_FIELDS or refused in named:
                named[refused] += 1

    def path_table(self) -> str:
        """Return the statuses of each path as lines of text, with the number of fields that it refused."""
        lines = [f"{'path':36} {'served':>7} {'refused':>7} {'fields':>6}  statuses"]
        for path, statuses in sorted(self.paths.items(), key=lambda item: item[0].partition(" ")[2]):
            served = sum(count for status, count in statuses.items() if status < 400)
            refused, fields = statuses.total() - served, len(self.refused[path])
            lines.append(f"{path:36} {served:7} {refused:7} {fields:6}  {dict(sorted(statuses.items()))}")
        return "\n".join(lines)

    def seen(self, kind: str, data: bytes) -> None:
        """Look for another's data in what the attacker was sent."""
        for secret in self.secrets:
            if secret in data:
                at = data.index(secret)
                self.violated(f"{kind}: it was sent {secret!r}: {data[max(0, at - 200) : at + 200]!r}")

    def violated(self, what: str) -> None:
        """Note a violation, with what was sent last."""
        with self._lock:
            self.violations.append("\n    ".join([what, "sent last:", *self.last]))


class Vitals:
    """The cluster's processes against what they were at the start."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.start: dict[str, Usage] = {name: used for name, used in cluster.usage().items() if not _has_no_title(name)}
        self.peak: dict[str, int] = {name: usage.rss for name, usage in self.start.items()}
        self._untitled: dict[int, float] = {}
        """When each process without a title was seen first, by its pid."""

    def check(self) -> list[str]:
        """Return what is wrong now: processes that ended or came, and memory."""
        now = self._cluster.usage()
        problems = [
            f"{name} ended (pid {usage.pid})"
            for name, usage in self.start.items()
            if (name not in now or now[name].pid != usage.pid) and not name.startswith(REPLACED)
        ]
        for name in now.keys() - self.start.keys():
            if not name.startswith(REPLACED) and not self._is_starting(name, now[name].pid):
                problems.append(f"{name} was started")
        for name in now.keys() - self.start.keys():
            if now[name].rss > REPLACED_BYTES:
                problems.append(f"{name} holds {now[name].rss >> 20} MiB")
        for name in now.keys() & self.start.keys():
            self.peak[name] = max(self.peak[name], now[name].rss)
            grown = now[name].rss - self.start[name].rss
            if grown > PEAK_BYTES:
                problems.append(f"{name} has grown by {grown >> 20} MiB")
        return problems

    def _is_starting(self, name: str, pid: int) -> bool:
        """Return whether a process is so young that it may still set a title, as those of ``REPLACED`` do."""
        if not _has_no_title(name):
            return False
        now = time.monotonic()
        return now - self._untitled.setdefault(pid, now) < limit(10)

    def check_left(self, seconds: float) -> list[str]:
        """Return what an idle cluster still holds more than at the start, after ``seconds`` at most."""
        deadline = time.monotonic() + seconds
        while problems := self.check() + self._left():
            if time.monotonic() > deadline:
                break
            time.sleep(0.5)
        return problems

    def _left(self) -> list[str]:
        problems, now = [], self._cluster.usage()
        for name in now.keys() & self.start.keys():
            start, last = self.start[name], now[name]
            grown, more = last.rss - start.rss, last.descriptors - start.descriptors
            if grown > LEFT_BYTES:
                problems.append(f"{name} keeps {grown >> 20} MiB more than at the start")
            if more > LEFT_DESCRIPTORS:
                problems.append(f"{name} keeps {more} descriptors more than at the start")
        return problems

    def table(self) -> str:
        """Resident memory of each process as lines of text: start, peak, now (MiB), and descriptors."""
        now = self._cluster.usage()
        lines = [f"{'process':50} {'start':>7} {'peak':>7} {'now':>7} MiB  descriptors"]
        for name, usage in self.start.items():
            last = now.get(name, usage)
            sizes = f"{usage.rss >> 20:7} {self.peak[name] >> 20:7} {last.rss >> 20:7}"
            lines.append(f"{name:50} {sizes}      {usage.descriptors} → {last.descriptors}")
        return "\n".join(lines)


def _has_no_title(name: str) -> bool:
    """Return whether a process is still called by its interpreter's path."""
    return Path(name.partition(" < ")[0]).name.startswith("python")
