"""Limits that a process sets for itself before it works on what strangers wrote."""

from __future__ import annotations

import resource
import signal
from pathlib import Path


def limit_process(memory_bytes: int) -> None:
    """Limit this process's address space to its present size plus ``memory_bytes``, and forbid it to write to files.

    A limit that the process has already (``ulimit -v``) stays if it is lower.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + memory_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def start_clock(cpu_seconds: float) -> None:
    """Give this process ``cpu_seconds`` of CPU time from now on. After them, the kernel ends it by SIGPROF.

    Another call replaces what is left of the time.
    """
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
