"""One process of a cluster, across its lives.

stopped ──start()──▶ running ──it ends──▶ dead ──after a pause that doubles──▶ start() again
                        └── send(STOP), kill() ─▶ dead
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Protocol

import msgspec

from ..runtime.fork_server import ForkOrder, ForkServer
from ..runtime.output import copy_to_stderr
from ..runtime.python import python_command
from ..runtime.web.own_admin_key import own_admin_key_file
from .child_process import AdoptedProcess, Process
from .cluster_plan import ProcessPlan
from .log_folder import LogFolder
from .supervisor import describe_exit

logger = logging.getLogger(__name__)

FIRST_PAUSE = 0.25
"""Seconds before the first restart; each further one within ``MEMORY`` doubles them."""
LONGEST_PAUSE = 10.0
MEMORY = 60.0
"""Seconds after which a death is forgotten."""
FORK_SECONDS = 60.0
"""Longest wait for a fork server, which imports modules first."""


Spawn = Callable[[IO[bytes]], Process]
"""Starts a process with this standard output and error."""


class ProcessOutput(Protocol):
    """Where the output of the cluster's processes goes."""

    def attach(self, name: str, spawn: Spawn) -> Process:
        """Call ``spawn`` to start the process ``name``, and receive its output. Raises ``OSError``."""


class ForwardedOutput:
    """Copies output to standard error. ``named_lines``: each line comes after the process's name, as text should."""

    def __init__(self, *, named_lines: bool = True) -> None:
        self._named_lines = named_lines

    def attach(self, name: str, spawn: Spawn) -> Process:
        """Start the process, and copy its output to standard error from a thread of its own.

        With ``named_lines``, each line comes after the process's name.
        """
        read, write = map(os.fdopen, os.pipe(), ("rb", "wb"))
        try:
            with write:
                process = spawn(write)
        except BaseException:  # whatever it was: no thread will own this end
            read.close()
            raise
        prefix = f"{name:<10} | " if self._named_lines else ""
        threading.Thread(target=copy_to_stderr, args=(read, prefix), name=f"log of {name}", daemon=True).start()
        return process


class LoggedOutput:
    """Writes output to a file for each process."""

    def __init__(self, logs: LogFolder) -> None:
        self._logs = logs

    def attach(self, name: str, spawn: Spawn) -> Process:
        """Start the process with its output appended to ``NAME.log`` in the log folder. Raises ``OSError``."""
        with self._logs.open(f"{name}.log") as log:
            return spawn(log)


class ClusterProcess:
    """A planned process: starts it and counts its deaths. Times are ``time.monotonic()``."""

    def __init__(self, plan: ProcessPlan, output: ProcessOutput) -> None:
        self.plan = plan
        self.pidfd = -1
        self.started = 0.0
        self.ready_after: float | None = None
        self.restart_at: float | None = None
        self._output = output
        self._process: Process | None = None
        self._deaths: deque[float] = deque()

    @property
    def running(self) -> bool:
        """Whether the process has been started and ``take_end`` has not been called since."""
        return self._process is not None

    @property
    def own_admin_key_file(self) -> Path | None:
        """The file with the admin key that the process drew at its start; None if it drew none or does not run."""
        return own_admin_key_file(self._process.pid) if self._process is not None else None

    @property
    def deaths(self) -> int:
        """Number of deaths of the process within the last ``MEMORY`` seconds."""
        while self._deaths and self._deaths[0] < time.monotonic() - MEMORY:
            self._deaths.popleft()
        return len(self._deaths)

    def start(self, fork_server: ForkServer | None = None) -> None:
        """Start the process, by ``fork_server`` or as a program of its own. ``pidfd`` becomes readable when it ends.

        Raises ``OSError`` if the process can't be started or its log file can't be opened, and ``ForkServerFailed``.
        """
        self.started = time.monotonic()
        self.restart_at = None
        order = self.plan.fork_order
        spawn = self._spawn if fork_server is None or order is None else partial(self._fork, fork_server, order)
        read, write = map(os.fdopen, os.pipe(), ("rb", "wb"))
        with write:
            with read:
                self._process = self._output.attach(self.plan.name, partial(spawn, read))
            if self.plan.command is not None:
                with contextlib.suppress(BrokenPipeError):  # it may be dead already, which its pidfd says
                    write.write(msgspec.json.encode(self.plan.command))
                    write.flush()
        self.pidfd = os.pidfd_open(self._process.pid)

    def _spawn(self, command: IO[bytes], output: IO[bytes]) -> Process:
        # A process group of its own: Ctrl-C in the terminal reaches only this process, which then ends all in order.
        return subprocess.Popen(
            python_command(*self.plan.argv),
            stdin=command,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
            pass_fds=self.plan.descriptors,
        )

    @staticmethod
    def _fork(fork_server: ForkServer, order: ForkOrder, command: IO[bytes], output: IO[bytes]) -> Process:
        fork_server.send(order, command.fileno(), output.fileno(), order.descriptors)
        [(_, pid)] = fork_server.started(1, time.monotonic() + FORK_SECONDS)
        return AdoptedProcess(pid)

    def take_end(self) -> str:
        """Wait until the process has ended, and set ``restart_at``, the time of its restart.

        Return in words how it ended. Nothing is restarted here: the caller must call ``start`` at that time. The pause
        until then doubles with each death in the last ``MEMORY`` seconds.
        """
        assert self._process is not None
        how = describe_exit(self._process.wait())
        os.close(self.pidfd)
        self._process = None
        pause = min(FIRST_PAUSE * 2**self.deaths, LONGEST_PAUSE)
        now = time.monotonic()
        self._deaths.append(now)
        self.restart_at = now + pause
        return how

    def send(self, number: signal.Signals) -> None:
        """Send the process a signal. Do nothing if it does not run."""
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the process and wait until it is gone, and log that it did not end in time.

        Its own children die with it.
        """
        if self._process is None:
            return
        logger.warning("%s did not end in time: killed", self.plan.name)
        self._process.kill()
        self.take_end()
