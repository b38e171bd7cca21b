"""Cores and niceness of threads where the system refuses them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.machine import limit

from pdserve.model_runner.device.gpu_placement import stay_near
from pdserve.model_runner.device.placement import bind_calling_thread, confine, floating, plan_placement
from pdserve.runtime.machine.threads import restrict_thread, set_niceness
from pdserve.runtime.machine.topology import read_machine
from tests.unit.runtime.test_placement import machine

GONE = frozenset({1000, 1001})
"""Cores that the kernel refuses with EINVAL, as it does for cores that have left the process's cpuset."""


def test_a_thread_is_restricted_to_the_cores_that_are_left() -> None:
    def run() -> None:
        allowed = os.sched_getaffinity(0)
        assert restrict_thread(0, {min(allowed), *GONE})
        assert os.sched_getaffinity(0) == {min(allowed)}
        assert not restrict_thread(0, GONE)
        assert os.sched_getaffinity(0) == {min(allowed)}

    with ThreadPoolExecutor(1) as pool:  # a thread of its own, since it loses cores
        pool.submit(run).result()


def test_placement_on_cores_that_are_gone_changes_nothing_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    own = os.sched_getaffinity(0)
    placement = plan_placement(None, None, read_machine())
    confine(placement._replace(home=GONE))
    bind_calling_thread(placement._replace(cpus=(1000,)))
    with floating(placement._replace(allowed=GONE)):
        assert os.sched_getaffinity(0) == own
    stay_near(0, machine(2)._replace(nodes={0: GONE, 1: own}))
    assert os.sched_getaffinity(0) == own
    lines = [record.message for record in caplog.records if "can't be kept on" in record.message]
    assert ["core 1000:" in line for line in lines] == [False, True, False, False]


UNPRIVILEGED = """
import os, resource
os.setpriority(os.PRIO_PROCESS, 0, 12)
if os.getuid() == 0:
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
assert resource.getrlimit(resource.RLIMIT_NICE)[0] < 9, "this user may lower niceness"
"""
NICE = f"""
from concurrent.futures import ThreadPoolExecutor
from pdserve.model_runner.device.placement import yield_cores
from pdserve.runtime.machine.threads import set_niceness
{UNPRIVILEGED}
yield_cores(10)
with ThreadPoolExecutor(1, initializer=set_niceness, initargs=(0,)) as pool:
    assert pool.submit(lambda: os.getpriority(os.PRIO_PROCESS, 0)).result() == 12
yield_cores(15)
assert os.getpriority(os.PRIO_PROCESS, 0) == 15
"""


def test_a_user_who_may_not_lower_the_niceness_of_threads_keeps_it() -> None:
    """A prefill of `pdserve up` has niceness 10, and the threads of its grammars ask for less."""
    done = subprocess.run([sys.executable, "-c", NICE], capture_output=True, text=True, timeout=limit(60))
    assert done.returncode == 0, done.stderr


def test_a_system_that_tells_no_niceness_either_ends_no_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", refuse)
    monkeypatch.setattr(os, "getpriority", refuse)
    with caplog.at_level("INFO"):
        set_niceness(3)
    assert "should be 3: Operation not permitted" in caplog.text
