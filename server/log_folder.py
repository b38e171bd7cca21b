"""The folder of ``pdserve up --log-dir``: one log file for each process.

Logs hold what clients sent, and they are written with this user's rights. So no other user may choose where they go.
The folder, links to it and links in it must not be another user's. A sticky folder such as /tmp is accepted,
because no other user can rename or remove a file there.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import IO

from ..runtime.trusted_path import distrust, foreign, without_links

OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A pipe would keep the open waiting until it is read.
OPEN_LOG = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class LogFolderError(OSError):
    """A log folder or log file that can't be used. The message says why."""


class LogFolder:
    """Opens log files in a folder that no other user controls. Keeps nothing open itself."""

    def __init__(self, path: Path) -> None:
        """Create the folder, mode 0700, if it is missing.

        Raises ``LogFolderError`` if it can't be created or another user has control of it.
        """
        self._path = path
        try:
            without_links(path).mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as e:
            raise self._error(path, e.strerror or str(e)) from e
        os.close(self._open_folder())

    def open(self, name: str) -> IO[bytes]:
        """Open the log file ``name`` to append to it, and create it if it is missing. Raises ``LogFolderError``.

        The folder is checked at each call: it may have been moved away and made anew since the last one.
        """
        folder = self._open_folder()
        try:
            file = os.open(name, OPEN_LOG, 0o600, dir_fd=folder)
        except OSError as e:
            # Linux says ELOOP for a link and ENXIO for a pipe or socket.
            reason = "it is a link; remove it" if self._is_link(name, folder) else e.strerror or str(e)
            raise self._error(self._path / name, reason) from e
        finally:
            os.close(folder)
        state = os.fstat(file)
        if reason := _not_a_log(state):
            os.close(file)
            raise self._error(self._path / name, reason)
        os.set_blocking(file, True)
        return os.fdopen(file, "ab")

    def _open_folder(self) -> int:
        try:
            folder = os.open(without_links(self._path), OPEN_FOLDER)
        except OSError as e:
            raise self._error(self._path, e.strerror or str(e)) from e
        state = os.fstat(folder)
        reason = foreign(state) if state.st_mode & stat.S_ISVTX else distrust(state)
        if reason:
            os.close(folder)
            raise self._error(self._path, reason)
        return folder

    @staticmethod
    def _is_link(name: str, folder: int) -> bool:
        try:
            return stat.S_ISLNK(os.lstat(name, dir_fd=folder).st_mode)
        except OSError:
            return False

    @staticmethod
    def _error(path: Path, reason: str) -> LogFolderError:
        return LogFolderError(f"--log-dir: {path} is not used: {reason}")


def _not_a_log(state: os.stat_result) -> str:
    """Return why an open file must not be written to as a log; "" if it may be."""
    if not stat.S_ISREG(state.st_mode):
        return "it is not a regular file; remove it"
    if state.st_nlink > 1:
        return "it has a second name (hard link), under which it may be another file; remove it"
    return foreign(state)
