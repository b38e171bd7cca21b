"""Ends the servers that tests have started when the test process dies without doing so, as a killed pytest does.

The parent-death signal of Linux follows the thread that started a process, which may end long before the test does. So
a small process watches instead: it holds the other end of a pipe, and ends what is listed when the pipe closes.
"""

from __future__ import annotations

import functools
import subprocess
import sys

WATCH = """
import os, signal, sys

def tell(fd, number):
    try:
        signal.pidfd_send_signal(fd, number)
        return True
    except ProcessLookupError:
        os.close(fd)
        return False

running = []
for line in sys.stdin:
    running = [fd for fd in running if tell(fd, 0)]
    try:
        running.append(os.pidfd_open(int(line)))
    except ProcessLookupError:
        pass
for fd in running:
    tell(fd, signal.SIGKILL)
"""


def end_with_this_process(pid: int) -> None:
    """End the child process ``pid`` with SIGKILL if this process dies first. Its children have to see to themselves."""
    pipe = _watcher().stdin
    assert pipe is not None
    pipe.write(f"{pid}\n".encode())
    pipe.flush()


@functools.cache
def _watcher() -> subprocess.Popen[bytes]:
    # In a session of its own, so that signals to pytest's process group leave it to its work.
    return subprocess.Popen([sys.executable, "-P", "-S", "-c", WATCH], stdin=subprocess.PIPE, start_new_session=True)
