"""The benchmark's end of a process that it measures (``child.py``): it is asked, waited for, and always ended."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import tempfile
from multiprocessing.connection import Connection
from types import TracebackType

from ...runtime.python import python_command
from ..errors import BenchError
from .messages import ANSWERS, Answer, Command, Failed, encode
from .pools import SharedPools
from .sides import LIMIT_SECONDS

LAST_LINES = 5
GRACE_SECONDS = 15.0
"""What a process has beyond its own limit, so that it can say itself what hangs."""


class SideError(BenchError):
    """A process failed, died or hangs; the message says which, and at what."""


class SideProcess:
    """A child process that is one side of a transfer. Use it as a context; the end of the context kills the process.

    ``name`` stands for the process in error messages.
    """

    def __init__(self, name: str, pools: SharedPools, limit_seconds: float = LIMIT_SECONDS + GRACE_SECONDS) -> None:
        self.name = name
        self._limit = limit_seconds
        ours, theirs = multiprocessing.Pipe()
        self._connection: Connection = ours
        passed = (theirs.fileno(), *pools.descriptors)
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self.process = subprocess.Popen(
            python_command("-m", "pdserve.benchmark.transfer.child", *map(str, (os.getpid(), *passed))),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._printed,
            pass_fds=passed,
            # Ctrl-C goes to this process alone, which then ends the child.
            start_new_session=True,
        )
        theirs.close()

    def __enter__(self) -> SideProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        self._connection.close()
        self._printed.close()

    def ask(self, command: Command, seconds: float = 0.0) -> Answer:
        """Send ``command`` to the child process, wait, and return its answer. Raises ``SideError``.

        ``seconds``: what the command takes on purpose, added to the usual limit.
        """
        doing, limit = type(command).__name__, self._limit + seconds
        try:
            self._connection.send_bytes(encode(command))
            if not self._connection.poll(limit):
                raise SideError(f"{self.name} hangs: no answer to {doing} within {limit:g} s{self._last_words()}")
            answer = ANSWERS.decode(self._connection.recv_bytes())
        except (EOFError, ConnectionError) as e:
            # It closes its end by ending, so this does not take long.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE_SECONDS)
            ended = f"{self.name} ended with {self.process.returncode}"
            raise SideError(f"{ended} instead of an answer to {doing}{self._last_words()}") from e
        if isinstance(answer, Failed):
            raise SideError(f"{self.name} failed at {doing}: {answer.error}{self._last_words()}")
        return answer

    def _last_words(self) -> str:
        """Return the last lines that the child process or its libraries printed, to be shown with an error."""
        self._printed.seek(0)
        lines = self._printed.read().decode(errors="replace").splitlines()[-LAST_LINES:]
        return "".join(f"\n    {line}" for line in lines)
