"""Check of ports of the loopback address: whether they are free, and otherwise which process listens there."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ...messages.decode import shown
from ...runtime.web.ports import LOOPBACK, check_port_free
from .finding import Finding, ok, warning

LISTENING = "0A"
"""The state of a listening socket in /proc/net/tcp."""
OURS = "pdserve "
"""What the titles of our processes begin with."""
TITLE_CHARS = 60


class ListeningProcess(NamedTuple):
    """A process that listens; ``title``: its command line, or what it calls itself."""

    pid: int
    title: str


def look_at_ports(ports: dict[int, str], proc: Path = Path("/proc")) -> Iterator[Finding]:
    """Examine each of ``ports`` on the loopback address: is it free, or which process listens there?

    Each port comes with the name of its usual listener, or "". ``proc``: where /proc is.
    """
    for port, usual in ports.items():
        name = f"{port} ({usual})" if usual else str(port)
        try:
            check_port_free(LOOPBACK, port)
        except OSError as e:
            if e.errno != errno.EADDRINUSE:
                yield warning("ports", f"{name} can't be listened on: {e.strerror}", "Choose another one.")
                continue
            listener = find_listener(port, proc)
            if listener is None:
                yield warning("ports", f"{name} is taken, by a process of another user", "Choose another with --port.")
            elif listener.title.startswith(OURS):
                yield ok("ports", f"{name} is {listener.title}'s, process {listener.pid}")
            else:
                who = f"process {listener.pid} ({shown(listener.title, TITLE_CHARS)})"
                yield warning("ports", f"{name} is taken, by {who}", "Choose another with --port, or end that process.")
        else:
            yield ok("ports", f"{name} is free")


def find_listener(port: int, proc: Path = Path("/proc")) -> ListeningProcess | None:
    """Find the process that listens on TCP ``port``, at any address; None if it cannot be seen.

    Processes of other users can't be seen. ``proc``: where /proc is.
    """
    wanted = {f"socket:[{inode}]" for inode in _inodes(port, proc)}
    if not wanted:
        return None
    for folder in proc.glob("[0-9]*"):
        try:
            if any(file.readlink().name in wanted for file in (folder / "fd").iterdir()):
                title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                return ListeningProcess(int(folder.name), title)
        except OSError:
            # Another user's process, or one that has ended meanwhile.
            continue
    return None


def _inodes(port: int, proc: Path) -> Iterator[str]:
    for name in ("tcp", "tcp6"):
        file = proc / "net" / name
        for line in file.read_text().splitlines()[1:] if file.is_file() else ():
            fields = line.split()
            if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]
