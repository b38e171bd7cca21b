"""Servers of tests end with the test process, however that dies."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from support.machine import limit
from support.processes import wait_until

PARENT = """
import subprocess, sys, threading
from support.orphans import end_with_this_process
children = []
def start():
    children.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
    end_with_this_process(children[0].pid)
thread = threading.Thread(target=start)
thread.start()
thread.join()
print(children[0].pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_ends_with_a_killed_test_process(how: signal.Signals) -> None:
    tests = Path(__file__).parents[2]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", PARENT], env={"PYTHONPATH": str(tests)}, **pipes) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        try:
            parent.send_signal(how)
            parent.wait(limit(10))
            wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, 10, "the server ends")
        finally:
            with suppress(psutil.NoSuchProcess):
                child.kill()
