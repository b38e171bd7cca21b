"""CPU time of other processes, as the kernel counts it in ``/proc``: all their threads."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

NANO = 1e-9
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process since its start, in seconds, in steps of the kernel's tick (10 ms).

    Threads that have ended count; child processes do not.
    """
    fields = _stat(Path("/proc", str(pid)))
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


def cpu_seconds_now(pid: int) -> float:
    """Return the CPU seconds of the live threads of a process and of its descendants, to the nanosecond.

    The difference of two calls is the time in between, if no thread has ended.
    """
    total = 0
    for thread in Path("/proc", str(pid), "task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended since the folder was listed
            total += int(thread.joinpath("schedstat").read_text().split()[0])
    return total * NANO + sum(cpu_seconds_now(child) for child in find_children(pid).values())


def find_children(pid: int) -> dict[str, int]:
    """Return the pids of a process's live children, by their command lines."""
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
    """Return the fields of a process's ``stat`` file after the command's name.

    The name is left out because it may contain spaces and brackets.
    """
    return path.joinpath("stat").read_text().rpartition(")")[2].split()
