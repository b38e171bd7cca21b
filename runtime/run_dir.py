"""The private folder of a running server: its sockets and small files.

It is locked (flock) as long as its server lives. A folder that is not locked was left behind by a server that was
killed, and the next server of the same user removes it. A process number would not tell: containers may share /tmp and
not their processes. systemd-tmpfiles leaves a locked folder alone, too.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from .file_lock import try_lock

SOCKET_PATH_CHARS = 107
"""The longest name of a Unix socket."""
RUN_DIR_PREFIX = "pdserve-"
RUN_DIR_NAME = re.compile(RUN_DIR_PREFIX + r"[0-9]+-[a-z0-9_]{8}")
"""Names of run directories. Users may keep folders with similar names, like /tmp/pdserve-kv-cache."""
RUN_DIR_CHARS = len("/pdserve-4194304-abcdefgh/worker_events.ipc")
"""The longest path of an instance's socket, within the folder for temporary files."""
SHORT_FOLDER = Path("/tmp")


class RunDir:
    """A new folder that only this user can enter, until ``remove``. Raises ``OSError`` where it can't be made."""

    def __init__(self) -> None:
        remove_stale_run_dirs()
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=f"{RUN_DIR_PREFIX}{os.getpid()}-", dir=run_dir_parent()))
            try:
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:  # a server that starts at this moment took it for one left behind
                continue
            if self._is_kept():
                return
            os.close(self._lock)

    def _is_kept(self) -> bool:
        """Lock the folder. Return False if another server has taken it for one left behind, and removes it."""
        try:
            is_locked = try_lock(self._lock)
        except OSError:  # a file system without locks: no other process can lock the folder and remove it
            return self.path.exists()
        return is_locked and self.path.exists()

    def remove(self) -> None:
        """Delete the folder with all that is in it, and release its lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_stale_run_dirs() -> None:
    """Delete this user's run directories that no living server has locked: their servers were killed."""
    for path in run_dir_parent().glob(f"{RUN_DIR_PREFIX}*-*"):
        # Another server that starts at this moment may have removed it; a living one holds the lock.
        with suppress(OSError):
            if RUN_DIR_NAME.fullmatch(path.name) and path.lstat().st_uid == os.getuid():
                _remove_unlocked(path)


def _remove_unlocked(path: Path) -> None:
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)


def run_dirs_of(pid: int) -> list[Path]:
    """Return the run directories that process ``pid`` of this user has made."""
    found = run_dir_parent().glob(f"{RUN_DIR_PREFIX}{pid}-*")
    return [path for path in found if RUN_DIR_NAME.fullmatch(path.name) and path.lstat().st_uid == os.getuid()]


def run_dir_parent() -> Path:
    """Return the folder for temporary files (TMPDIR), or /tmp if Unix sockets don't fit into that.

    Cluster schedulers set TMPDIR to long paths.
    """
    folder = Path(tempfile.gettempdir())
    return folder if len(str(folder)) <= SOCKET_PATH_CHARS - RUN_DIR_CHARS else SHORT_FOLDER
