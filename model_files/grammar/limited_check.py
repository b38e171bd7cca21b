"""Checks grammars in a process of its own (``check_process.py``), so that a bad one can't stop the server.

The process starts with the first grammar, and again after one that took too much.
"""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import threading
import time
from collections import OrderedDict

from ...messages.grammar import Grammar
from ...runtime.python import python_command
from ...runtime.refusal_log import RefusalLog
from ..text.rendering import BrokenStream
from .errors import GrammarError
from .frames import CheckLimits, GrammarVerdict, Lines

log = logging.getLogger(__name__)
MODULE = "pdserve.model_files.grammar.check_process"
REMEMBERED = 256
"""Maximum number of remembered verdicts."""


class LimitedCheck:
    """Checks grammars. Any thread may; one waits for the other."""

    def __init__(self, limits: CheckLimits | None = None) -> None:
        self._limits = limits or CheckLimits()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._known: OrderedDict[Grammar, str] = OrderedDict()
        self._failures = RefusalLog(log, "grammar")

    def check(self, grammar: Grammar) -> None:
        """Raise ``GrammarError`` if ``grammar`` cannot be used."""
        with self._lock:
            if (error := self._known.get(grammar)) is None:
                error = self._known[grammar] = self._ask(grammar)
                if len(self._known) > REMEMBERED:
                    self._known.popitem(last=False)
        if error:
            raise GrammarError(error)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._lines.close()
            self._process.kill()
            self._process.wait()
            self._process = None

    def _ask(self, grammar: Grammar) -> str:
        try:
            if self._process is None or self._process.poll() is not None:
                self._start()
            self._lines.send(grammar)
            return self._lines.receive(GrammarVerdict, time.monotonic() + self._limits.seconds).error
        except (BrokenStream, OSError) as e:
            reason = self._reason(e)
            self.close()
            self._failures.add(reason)
            return reason

    def _start(self) -> None:
        self.close()
        ours, theirs = socket.socketpair()
        with theirs:
            command = python_command("-m", MODULE)
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
        self._lines = Lines(ours)
        self._lines.send(self._limits)

    def _reason(self, error: Exception) -> str:
        """Explain why the process did not answer."""
        assert self._process is not None
        if isinstance(error, TimeoutError):
            return f"the grammar takes more than {self._limits.seconds:g} s to check"
        code = self._process.wait(timeout=self._limits.seconds)
        if code == -signal.SIGPROF:
            return f"the grammar takes more than {self._limits.cpu_seconds:g} s of a processor to check"
        return f"the grammar is too large or too deep (its check ended with {code})"
