"""Locks on open files (flock), which one process has at a time and loses when it ends. Every wait has a limit."""

from __future__ import annotations

import fcntl
import time

POLL_SECONDS = 0.02


def try_lock(fd: int) -> bool:
    """Take the exclusive lock of an open file without waiting; return False if another process has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_within(seconds: float, fd: int) -> bool:
    """Take the exclusive lock of an open file; return False if another process still has it after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not try_lock(fd):
        # The process that has it may hang, and the system's own wait has no limit.
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True
