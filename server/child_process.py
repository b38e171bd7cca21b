"""The processes of an instance, as the supervisor has them: how each is started, and ended.

A fork server imports the modules that they share once, and forks them (``runtime/fork_server.py``). The processes of
``pdserve up`` have one together. Of another instance, workers are programs of their own: a worker starts while the fork
server still imports what the other processes need.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple, Protocol

from ..runtime.fork_server import ForkOrder, ForkServer, ForkServerFailed
from ..runtime.python import python_command
from ..runtime.ranks import is_worker
from ..runtime.web.keys import API_KEY_VARIABLE

START = "pdserve.runtime.start"
OTHERS = "others"
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
    starts: Sequence[Start],
    output: IO[bytes],
    descriptors: Sequence[int],
    timeout: float,
    fork_server: ForkServer | None = None,
) -> Iterator[Child]:
    """Start processes that write to ``output``, and yield each one once it is started.

    ``fork_server`` starts them, and is closed. None: model workers are started as programs of their own, before a new
    fork server starts the others. Those others inherit ``descriptors``. Raises ``StartFailed`` if not all are started
    within ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    forked = list(starts)
    if fork_server is None:
        forked = [start for start in starts if not is_worker(start.name)]
        for start in starts:
            if is_worker(start.name):
                yield Child.of(start.name, _spawn_worker(start, output))
        if not forked:
            return
        fork_server = ForkServer.spawn((), child_environment(OTHERS), output.fileno())
    with closing(fork_server), open(os.devnull, "rb") as nothing:
        waiting = {number: start.name for number, start in enumerate(forked)}
        try:
            for number, start in enumerate(forked):
                kept = () if is_worker(start.name) else tuple(descriptors)
                order = ForkOrder(
                    number, start.module, (str(start.spec),), thread_settings(start.name), descriptors=kept
                )
                fork_server.send(order, nothing.fileno(), output.fileno(), kept)
            for number, pid in fork_server.started(len(forked), deadline):
                yield Child.of(waiting.pop(number), AdoptedProcess(pid))
        except TimeoutError:
            names = ", ".join(waiting.values())
            raise StartFailed(f"not started in time: {names}; raise --startup-timeout on a slow machine") from None
        except ForkServerFailed as e:
            raise StartFailed(f"{', '.join(waiting.values())}: {e}") from None


def _spawn_worker(start: Start, output: IO[bytes]) -> subprocess.Popen[bytes]:
    argv = python_command("-m", START, start.module, str(start.spec))
    env = child_environment(start.name)
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env)


def child_environment(name: str) -> dict[str, str]:
    """Return the environment of the child process ``name``: this process's own, with its thread settings.

    The API key is left out, because other processes of this user can read a worker's environment.
    """
    own = {variable: value for variable, value in os.environ.items() if variable != API_KEY_VARIABLE}
    return own | thread_settings(name)


def thread_settings(name: str) -> dict[str, str]:
    """Return the environment variables that settle the threads of the child process ``name``.

    OpenMP reads them when its library is loaded, before any code of ours can set anything.
    """
    if is_worker(name):
        # Idle threads of a team sleep soon, instead of spinning on cores that other processes need. A short spin
        # bridges the gap between two layers, where waking a sleeping thread would cost more than it saves.
        return {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "20000", "OPENBLAS_NUM_THREADS": "1"}
    # One thread, too, as a fork server must have.
    return {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
