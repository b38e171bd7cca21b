"""Limits that a process sets for itself before it works on what strangers wrote."""

from __future__ import annotations

import resource
import signal
from pathlib import Path


def limit_process(memory_bytes: int) -> None:
    """Limit memory to ``memory_bytes`` beside that of now, and forbid files."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def start_clock(cpu_seconds: float) -> None:
    """Give the process its CPU time for one message. The kernel ends it by SIGPROF after that."""
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
