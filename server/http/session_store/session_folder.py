"""The folder of sessions as the event loop uses it: few calls at a time, each in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ...options import ServerOptions
from ..errors import ApiError
from .session_files import SessionError, SessionFiles, SessionLimits

GB = 10**9
HOUR = 3600.0
MOST_AT_ONCE = 4
"""Maximum number of files that are read or written at a time."""
OFF = "sessions are off: start the server with --kv-sessions-dir FOLDER"

T = TypeVar("T")


def open_sessions(options: ServerOptions) -> SessionsOff:
    """Open the folder of sessions that the options name, and make it if need be.

    Without a name, return ``SessionsOff``. Raises ``SessionError``.
    """
    if options.kv_sessions_dir is None:
        return SessionsOff()
    limits = SessionLimits(
        int(options.kv_sessions_size * GB), int(options.kv_sessions_quota * GB), options.kv_sessions_ttl * HOUR
    )
    try:
        return Sessions(SessionFiles(Path(options.kv_sessions_dir).expanduser(), limits))
    except OSError as e:
        raise SessionError(503, f"--kv-sessions-dir {options.kv_sessions_dir}: {e.strerror or e}") from e


class SessionsOff:
    """The folder of a server without sessions."""

    @property
    def files(self) -> SessionFiles:
        """Raise ``ApiError`` 501: this server keeps no sessions."""
        raise ApiError(501, OFF)

    async def run(self, call: Callable[[SessionFiles], T]) -> T:
        """Raise ``ApiError`` 501 without calling ``call``: this server keeps no sessions."""
        return call(self.files)


class Sessions(SessionsOff):
    """Access to the files from the event loop: ``run`` calls one of their methods in a thread."""

    def __init__(self, files: SessionFiles) -> None:
        self._files = files
        self._running = asyncio.Semaphore(MOST_AT_ONCE)

    @property
    def files(self) -> SessionFiles:
        """The session files. Calls of most of their methods block."""
        return self._files

    async def run(self, call: Callable[[SessionFiles], T]) -> T:
        """Call ``call`` with the files in a thread, and return its result.

        At most ``MOST_AT_ONCE`` calls run at a time. A ``SessionError`` is raised as an ``ApiError`` of the same
        status.
        """
        async with self._running:
            try:
                return await asyncio.to_thread(call, self._files)
            except SessionError as e:
                raise ApiError(e.status, str(e)) from None
