"""Checks grammars in a process of its own (``check_process.py``), so that a bad one can't stop the server.

The process starts with the first grammar, and again after one that took too much.
"""

from __future__ import annotations

import hashlib
import logging
import signal
import socket
import subprocess
import threading
import time
from collections import OrderedDict
from contextlib import ExitStack

import msgspec

from ...messages.grammar import Grammar
from ...runtime.python import python_command
from ...runtime.refusal_log import RefusalLog
from ..text.rendering import BrokenStream
from .errors import GrammarError
from .frames import CheckLimits, GrammarVerdict, Lines

log = logging.getLogger(__name__)
MODULE = "pdserve.model_files.grammar.check_process"
REMEMBERED = 4096
"""Maximum number of remembered verdicts."""
END_SECONDS = 5.0
"""Time for the process to end after it has closed its socket."""
TRIES = 2
"""Processes that a grammar gets: one may be ended from outside."""


class LimitedCheck:
    """Checks grammars. Any thread may; one waits for the other."""

    def __init__(self, limits: CheckLimits | None = None) -> None:
        self._limits = limits or CheckLimits()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._known: OrderedDict[bytes, str] = OrderedDict()
        """Verdicts by a grammar's digest: a grammar may have a megabyte."""
        self._failures = RefusalLog(log, "grammar")

    def check(self, grammar: Grammar) -> None:
        """Have the process check ``grammar`` and wait for the verdict, unless it is remembered.

        Raises ``GrammarError`` if the grammar cannot be used, or cannot be checked now.
        """
        digest = hashlib.blake2b(msgspec.msgpack.encode(grammar), digest_size=32).digest()
        with self._lock:
            if (error := self._known.get(digest)) is None:
                error = self._known[digest] = self._ask(grammar)
                if len(self._known) > REMEMBERED:
                    self._known.popitem(last=False)
        if error:
            raise GrammarError(error)

    def close(self) -> None:
        """Kill the process, if it runs. The next check starts another one."""
        if self._process is not None:
            self._lines.close()
            self._process.kill()
            self._process.wait()
            self._process = None

    def _ask(self, grammar: Grammar) -> str:
        """Return why ``grammar`` cannot be used; "" if it can.

        Raises ``GrammarError`` if that could not be found out.
        """
        code: int | None = None
        for _ in range(TRIES):
            try:
                if self._process is None or self._process.poll() is not None:
                    self._start()
                deadline = time.monotonic() + self._limits.seconds
                self._lines.send(grammar, deadline)
                return self._lines.receive(GrammarVerdict, deadline).error
            except TimeoutError:
                self.close()
                self._failures.add("no answer in time")
                raise GrammarError(f"its check took more than {self._limits.seconds:g} s; try again later") from None
            except (BrokenStream, OSError) as e:
                code = self._end_code()
                self._failures.add(f"the process ended with {code}: {e}")
            if code == -signal.SIGPROF:
                return f"the grammar takes more than {self._limits.cpu_seconds:g} s of a processor to check"
        if code is None or code == -signal.SIGKILL:
            raise GrammarError("the process that checks grammars cannot run; try again later")
        return f"the grammar is too large or too deep (its check ended with {code})"

    def _end_code(self) -> int | None:
        """Wait for the process to end, kill it after ``END_SECONDS``, and return its exit code.

        Return None if no process was started.
        """
        process = self._process
        if process is None:
            return None
        try:
            process.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            log.warning("the process that checks grammars has closed its socket, and goes on; it is killed")
        self.close()
        return process.returncode

    def _start(self) -> None:
        self.close()
        ours, theirs = socket.socketpair()
        with theirs, ExitStack() as undo:
            undo.callback(ours.close)
            command = python_command("-m", MODULE)
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
            undo.pop_all()
        self._lines = Lines(ours)
        self._lines.send(self._limits)
