"""The cores and the niceness of a thread. The system may refuse both at any time, which never ends a process."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Collection

from ..cpu_list import format_cores

log = logging.getLogger(__name__)


def restrict_thread(thread: int, cores: Collection[int]) -> bool:
    """Let the thread of id ``thread`` (0: the calling one) run on ``cores`` alone, and return whether that worked.

    The kernel refuses if none of ``cores`` is in the process's cpuset. Containers are resized and control groups are
    changed while a process runs, so ``cores`` that were allowed at the start may be gone. Sandboxes may always refuse.
    The thread then keeps the cores that it has. It computes the same there, only slower, so that is no error.
    """
    try:
        os.sched_setaffinity(thread, cores)
    except OSError:
        return False
    return True


def place_thread(thread: int, cores: Collection[int]) -> bool:
    """Call ``restrict_thread``, and log a warning if it fails."""
    if restrict_thread(thread, cores):
        return True
    log.warning("%s", refusal(cores))
    return False


def refusal(cores: Collection[int]) -> str:
    """Return the message for threads that ``restrict_thread`` could not place on ``cores``."""
    return (
        f"threads can't be kept on core{'s' * (len(cores) > 1)} {format_cores(sorted(cores))}: the system refuses it, "
        "perhaps because this process's cpuset has changed. They run on the cores that are left"
    )


def set_niceness(nice: int) -> None:
    """Set the niceness of the calling thread, and of all that it starts later, to ``nice``; only log it if that fails.

    Only privileged processes may lower it. One that was started with a higher niceness keeps that.
    """
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
    except OSError as error:
        log.info("a thread keeps its niceness, which should be %d: %s", nice, error.strerror)
