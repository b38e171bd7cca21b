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
from pathlib import Path
from typing import IO

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


class ClusterProcess:
    """A planned process: starts it, forwards its output, counts its deaths. Times are ``time.monotonic()``.

    ``named_lines``: whether each line of its output comes after its name, as lines of text should.
    """

    def __init__(self, plan: ProcessPlan, logs: LogFolder | None, *, named_lines: bool = True) -> None:
        self.plan = plan
        self._named_lines = named_lines
        self.pidfd = -1
        self.started = 0.0
        self.ready_after: float | None = None
        self.restart_at: float | None = None
        self._logs = logs
        self._process: subprocess.Popen[bytes] | None = None
        self._deaths: deque[float] = deque()

    @property
    def running(self) -> bool:
        """Whether it has been started and its end has not been taken in yet."""
        return self._process is not None

    @property
    def own_admin_key_file(self) -> Path | None:
        """The file with the admin key that it drew at its start, None if it drew none or does not run."""
        return own_admin_key_file(self._process.pid) if self._process is not None else None

    @property
    def deaths(self) -> int:
        """How often it died within the last ``MEMORY`` seconds."""
        while self._deaths and self._deaths[0] < time.monotonic() - MEMORY:
            self._deaths.popleft()
        return len(self._deaths)

    def start(self) -> None:
        """Start it; ``pidfd`` becomes readable when it ends. Raises ``OSError`` where that or its log file fails."""
        argv = python_command(*self.plan.argv)
        self.started = time.monotonic()
        self.restart_at = None
        if self._logs is None:
            self._process = self._spawn(argv, subprocess.PIPE)
            assert self._process.stdout is not None
            pump = threading.Thread(
                target=copy_to_stderr,
                args=(self._process.stdout, f"{self.plan.name:<10} | " if self._named_lines else ""),
                name=f"log of {self.plan.name}",
            )
            pump.daemon = True
            pump.start()
        else:
            with self._logs.open(f"{self.plan.name}.log") as log:
                self._process = self._spawn(argv, log)
        self.pidfd = os.pidfd_open(self._process.pid)

    def _spawn(self, argv: list[str], output: int | IO[bytes]) -> subprocess.Popen[bytes]:
        # A process group of its own: Ctrl-C in the terminal reaches only this process, which then ends all in order.
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
            pass_fds=self.plan.descriptors,
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:  # it may be dead already, which its pidfd says
            process.stdin.write(msgspec.json.encode(self.plan.command))
        return process

    def take_end(self) -> str:
        """Take in that it has ended (waits for it); returns how, in words, and plans its restart."""
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
        """Send it a signal; nothing happens if it has ended."""
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kill it and wait until it is gone. Its own children die with it."""
        if self._process is None:
            return
        logger.warning("%s did not end in time: killed", self.plan.name)
        self._process.kill()
        self.take_end()
