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
from pathlib import Path
from typing import IO, Protocol

import msgspec

from ..runtime.output import copy_to_stderr
from ..runtime.python import python_command
from ..runtime.web.own_admin_key import own_admin_key_file
from .cluster_plan import ProcessPlan
from .log_folder import LogFolder
from .supervisor import describe_exit

logger = logging.getLogger(__name__)

FIRST_PAUSE = 0.25
"""Seconds before the first restart; each further one within ``MEMORY`` doubles them."""
LONGEST_PAUSE = 10.0
MEMORY = 60.0
"""Seconds after which a death is forgotten."""


Spawn = Callable[[int | IO[bytes]], subprocess.Popen[bytes]]
"""Starts a process with this standard output."""


class ProcessOutput(Protocol):
    """Where the output of the cluster's processes goes."""

    def attach(self, name: str, spawn: Spawn) -> subprocess.Popen[bytes]:
        """Call ``spawn`` to start the process ``name``, and receive its output. Raises ``OSError``."""


class ForwardedOutput:
    """Copies output to standard error. ``named_lines``: each line comes after the process's name, as text should."""

    def __init__(self, *, named_lines: bool = True) -> None:
        self._named_lines = named_lines

    def attach(self, name: str, spawn: Spawn) -> subprocess.Popen[bytes]:
        """Start the process, and copy its output to standard error from a thread of its own.

        With ``named_lines``, each line comes after the process's name.
        """
        process = spawn(subprocess.PIPE)
        assert process.stdout is not None
        prefix = f"{name:<10} | " if self._named_lines else ""
        pump = threading.Thread(
            target=copy_to_stderr, args=(process.stdout, prefix), name=f"log of {name}", daemon=True
        )
        pump.start()
        return process


class LoggedOutput:
    """Writes output to a file for each process."""

    def __init__(self, logs: LogFolder) -> None:
        self._logs = logs

    def attach(self, name: str, spawn: Spawn) -> subprocess.Popen[bytes]:
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
        self._process: subprocess.Popen[bytes] | None = None
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

    def start(self) -> None:
        """Start the process. ``pidfd`` becomes readable when it ends.

        Raises ``OSError`` if the process can't be started or its log file can't be opened.
        """
        self.started = time.monotonic()
        self.restart_at = None
        self._process = self._output.attach(self.plan.name, self._spawn)
        self.pidfd = os.pidfd_open(self._process.pid)

    def _spawn(self, output: int | IO[bytes]) -> subprocess.Popen[bytes]:
        # A process group of its own: Ctrl-C in the terminal reaches only this process, which then ends all in order.
        process = subprocess.Popen(
            python_command(*self.plan.argv),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
            pass_fds=self.plan.descriptors,
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:  # it may be dead already, which its pidfd says
            if self.plan.command is not None:
                process.stdin.write(msgspec.json.encode(self.plan.command))
        return process

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
