"""CPU time of other processes, as the kernel counts it in ``/proc``: all their threads, in ticks of 10 ms."""

from __future__ import annotations

import os
from pathlib import Path

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time since the process's start."""
    fields = _stat(Path("/proc", str(pid)))
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


def find_children(pid: int) -> dict[str, int]:
    """The living children of a process: command line → pid."""
    children = {}
    for path in Path("/proc").iterdir():
        if not path.name.isdecimal():
            continue
        try:
            if int(_stat(path)[1]) == pid:
                title = path.joinpath("cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ")
                children[title.decode()] = int(path.name)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended since the folder was listed
    return children


def _stat(path: Path) -> list[str]:
    """The fields behind the command's name, which may itself hold spaces and brackets."""
    return path.joinpath("stat").read_text().rpartition(")")[2].split()
