"""Logging of every process: one line per record on stderr, as text or as JSON, with the request that it is about.

A record names its request by ``extra={"rid": …}``. Without it, the record belongs to the request of the HTTP task that
wrote it (``REQUEST_ID``). So a line of a library is found under the request's id, too.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import signal
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

from ..messages.decode import shown
from .output import never_block
from .refusal_log import limit_foreign_logs

LogFormat = Literal["text", "json"]

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the HTTP request that the running task serves. A task that it starts inherits it."""


class TextFormatter(logging.Formatter):
    """``12:00:00 I [process] message rid=…``."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname).1s [{process}] %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Format a record as one line, with its request's id if it has one. A traceback is not part of it."""
        line, rid = printable(super().formatMessage(record)), rid_of(record)
        return f"{line} rid={shown(rid)}" if rid else line

    def formatException(self, ei: Any) -> str:
        """Return a traceback of several lines, with escapes in place of control characters."""
        return "\n".join(map(printable, super().formatException(ei).split("\n")))


class JsonFormatter(logging.Formatter):
    """An object a line: ``time`` (UTC, ISO 8601), ``level``, ``process``, ``logger``, ``message``.

    Where there are, also ``rid``, ``exception`` (a traceback), and what the record has in ``extra={"fields": {…}}``.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as one line of JSON."""
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if rid := rid_of(record):
            entry["rid"] = rid
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        # The standard library's: half of a surrogate pair in a message must not cost the line.
        return json.dumps(entry | getattr(record, "fields", {}), default=str)


def printable(text: str) -> str:
    """Put ``text`` on one line. Line ends and control characters become Python's escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def rid_of(record: logging.LogRecord) -> str:
    """Return the id of the request that a record is about: the record's own, or the running task's; "" for none."""
    return str(getattr(record, "rid", "") or REQUEST_ID.get())


def configure_logging(process: str, level: str, log_format: LogFormat = "text", *, never_blocks: bool = False) -> None:
    """Log records of ``level`` and above to standard error. Lines name ``process``; SIGUSR2 prints all threads' stacks.

    With ``never_blocks``, lines are dropped rather than waited for when standard output or error is not read. That is
    for processes that write directly to the user's terminal or pipe. The supervisor's children do not need it, because
    the supervisor reads their output.
    """
    formatter = JsonFormatter(process) if log_format == "json" else TextFormatter(process)
    if never_blocks:
        for name in ("stdout", "stderr"):
            never_block(name, lambda lines: formatter.format(_dropped_record(lines)))
    faulthandler.register(signal.SIGUSR2)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # A line for each HTTP request between our own processes would be most of the log.
    for name in ("httpx", "httpcore", "uvicorn"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # uvicorn warns of each request that is none: any stranger could fill the log.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    limit_foreign_logs()


def _dropped_record(lines: int) -> logging.LogRecord:
    text = "%d lines were not logged: this output was not read in time"
    return logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (lines,), None)
