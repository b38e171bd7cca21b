"""The processes of an instance, as the supervisor has them: how each is started, and ended.

A worker is a Python of its own, since its environment is OpenMP's. All others are forked by one process, which imports
the modules that they share once (``runtime/start_together.py``).
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple, Protocol

from ..runtime.python import python_command
from ..runtime.ranks import is_worker
from ..runtime.start_together import adopt_orphans
from ..runtime.web.keys import API_KEY_VARIABLE

START = "pdserve.runtime.start"
START_TOGETHER = "pdserve.runtime.start_together"
TOGETHER = "others"
"""What ``child_environment`` calls the processes that are no workers."""


class StartFailed(Exception):
    """Processes can't be started; the message says which, and why."""


class Process(Protocol):
    """What the supervisor needs of ``subprocess.Popen``."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit code, None while the process runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code. Raises ``subprocess.TimeoutExpired`` after ``timeout`` seconds.

        None waits without limit.
        """

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless the process has ended."""

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""


class AdoptedProcess:
    """A child that this process did not start itself; see ``Process``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code if the child has ended, None while it runs. Never blocks."""
        return self._reap(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the child's end and return its exit code.

        Raises ``subprocess.TimeoutExpired`` after ``timeout`` seconds.
        """
        code = self._reap(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def send_signal(self, sig: int) -> None:
        """Signal the child by its pidfd, so a reused process id is never hit. Does nothing after its end."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, sig)

    def kill(self) -> None:
        """Send SIGKILL to the child; does nothing after its end."""
        self.send_signal(signal.SIGKILL)

    def _reap(self, timeout: float | None) -> int | None:
        if self._code is None and select.select([self._pidfd], [], [], timeout)[0]:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._pidfd)
        return self._code


class Start(NamedTuple):
    """What a process is started with."""

    name: str
    module: str
    spec: Path
    """File with its ``ChildSpec``."""


@dataclass
class Child:
    """A started process. ``pidfd`` becomes readable when it dies."""

    name: str
    process: Process
    pidfd: int
    ready: bool = False

    @classmethod
    def of(cls, name: str, process: Process) -> Child:
        """Make the record of a started process, and open its pidfd. The process must not have been waited for."""
        return cls(name, process, os.pidfd_open(process.pid))


def start_processes(
    starts: Sequence[Start], output: IO[bytes], descriptors: Sequence[int], timeout: float
) -> Iterator[Child]:
    """Start processes that write to ``output``, and yield each one once it is started, model workers first.

    All others inherit ``descriptors``. Raises ``StartFailed`` if these others are not started within ``timeout``
    seconds, or fail to start.
    """
    others = []
    for start in starts:
        if is_worker(start.name):
            argv = python_command("-m", START, start.module, str(start.spec))
            yield Child.of(start.name, _spawn(argv, child_environment(start.name), output, ()))
        else:
            others.append(start)
    if others:
        yield from _start_together(others, output, descriptors, time.monotonic() + timeout)


def _start_together(
    starts: Sequence[Start], output: IO[bytes], descriptors: Sequence[int], deadline: float
) -> Iterator[Child]:
    started = 0
    read, write = os.pipe()
    words = [word for start in starts for word in (start.module, str(start.spec))]
    argv = python_command("-m", START_TOGETHER, str(write), *words)
    adopt_orphans(True)
    starter = _spawn(argv, child_environment(TOGETHER), output, (*descriptors, write))
    os.close(write)
    try:
        with os.fdopen(read) as stream:
            while select.select([stream], [], [], max(0.0, deadline - time.monotonic()))[0] and (
                line := stream.readline()
            ):
                number, pid = map(int, line.split())
                started += 1
                yield Child.of(starts[number].name, AdoptedProcess(pid))
        if starter.wait(max(0.0, deadline - time.monotonic())) != 0 or started < len(starts):
            raise StartFailed("the processes beside the workers can't be started; the lines above say why")
    except subprocess.TimeoutExpired:
        names = ", ".join(start.name for start in starts)
        raise StartFailed(f"not started in time: {names}; raise --startup-timeout on a slow machine") from None
    finally:
        starter.kill()
        starter.wait()
        adopt_orphans(False)


def _spawn(
    argv: Sequence[str], env: Mapping[str, str], output: IO[bytes], descriptors: Sequence[int]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, pass_fds=descriptors)


def child_environment(name: str) -> dict[str, str]:
    """Return the environment of the child process ``name``: this process's own, with settings for the child's threads.

    The API key is left out, because other processes of this user can read a worker's environment. OpenMP reads its
    settings from the environment before any code of ours runs in the child.
    """
    env = {variable: value for variable, value in os.environ.items() if variable != API_KEY_VARIABLE}
    if is_worker(name):
        # Idle threads of a team sleep soon, instead of spinning on cores that other processes need. A short spin
        # bridges the gap between two layers, where waking a sleeping thread would cost more than it saves.
        env.update({"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "20000", "OPENBLAS_NUM_THREADS": "1"})
    else:
        # One thread, too, as the process that forks the others must have.
        env.update({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"})
    return env
