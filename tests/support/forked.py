"""Starts ``pdserve`` commands as forks of one process, which has imported their modules.

``pdserve up`` starts its instances in this way. A test's server needs no second for imports, nor its processor time.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from pdserve.runtime.fork_server import MODULE, PR_SET_CHILD_SUBREAPER, ForkOrder, ForkServer
from pdserve.runtime.hardening import prctl
from pdserve.runtime.python import python_command
from pdserve.runtime.ranks import WORKER
from pdserve.server.child_process import AdoptedProcess, thread_settings
from pdserve.server.options import ServerOptions
from pdserve.server.process_table import shared_modules

from .hostile_folder import hostile_folder
from .import_path import with_inherited
from .surroundings import ENVIRONMENT

TESTS = Path(__file__).parents[1]
COMMAND = "support.forked_command"
START_SECONDS = 60.0
"""Longest wait for a fork server, which imports modules first."""


class Forked(AdoptedProcess):
    """A forked command. It has what tests use of ``subprocess.Popen``."""

    def _reap(self, timeout: float | None) -> int | None:
        try:
            return super()._reap(timeout)
        except ChildProcessError:  # psutil has waited for it: its code is lost, and subprocess says 0, too
            self._code = 0
            return 0

    @property
    def returncode(self) -> int | None:
        """Exit code if the process has ended and was waited for."""
        return self._code


class Forks:
    """A fork server for processes of this test process. It runs in the hostile folder."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        modules = dict.fromkeys(
            name
            for options in (ServerOptions(), ServerOptions(disaggregation_mode="prefill"))
            for name in shared_modules(options)
        )
        with theirs:
            process = subprocess.Popen(
                python_command("-m", MODULE, str(theirs.fileno()), COMMAND, *modules),
                stdin=subprocess.DEVNULL,
                env={**ENVIRONMENT, **thread_settings(WORKER), "PYTHONPATH": with_inherited(TESTS)},
                cwd=hostile_folder().path,
                pass_fds=(theirs.fileno(),),
            )

        def end() -> None:
            process.kill()
            process.wait()

        self._server = ForkServer(ours, end)
        prctl(PR_SET_CHILD_SUBREAPER, 0)
        atexit.register(self._server.close)

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        output: int,
        stdin: int | None = None,
        descriptors: Mapping[int, int] | None = None,
    ) -> Forked:
        """Run ``main`` of a module with these arguments.

        ``output``: descriptor for standard output and error. ``stdin``: one to read; None: there is nothing to read.
        ``descriptors``: further ones, by the number that they have there.
        """
        more = descriptors or {}
        order = ForkOrder(0, module, tuple(arguments), descriptors=tuple(more), takes_signals=True)
        # This process is a subreaper only while it receives a child: orphans of servers that tests kill go to init.
        with self._lock, open(os.devnull, "rb") as nothing, contextlib.ExitStack() as stack:
            prctl(PR_SET_CHILD_SUBREAPER, 1)
            stack.callback(prctl, PR_SET_CHILD_SUBREAPER, 0)
            self._server.send(order, nothing.fileno() if stdin is None else stdin, output, tuple(more.values()))
            [(_, pid)] = self._server.started(1, time.monotonic() + START_SECONDS)
            return Forked(pid)


@cache
def forks() -> Forks:
    """Return the fork server of this process, which ends with it."""
    return Forks()
