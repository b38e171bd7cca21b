"""Where an instance's processes keep their sockets and small files."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

SOCKET_PATH_CHARS = 107
"""The longest name of a Unix socket."""
PREFIX = "pdserve-"
RUN_DIR_CHARS = len("/pdserve-4194304-abcdefgh/worker_events.ipc")
"""The longest path of an instance's socket, within the folder for temporary files."""
SHORT_FOLDER = Path("/tmp")


def run_dir_parent() -> Path:
    """Return the folder for temporary files (TMPDIR), or /tmp if Unix sockets don't fit into that.

    Cluster schedulers set TMPDIR to long paths.
    """
    folder = Path(tempfile.gettempdir())
    return folder if len(str(folder)) <= SOCKET_PATH_CHARS - RUN_DIR_CHARS else SHORT_FOLDER


def make_run_dir() -> tuple[Path, int]:
    """Make a directory that only this user can enter, and lock it.

    Returns the directory, and the descriptor that holds the lock until this process closes it or dies.
    """
    path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=run_dir_parent()))
    lock = _open(path)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return path, lock


def remove_stale_run_dirs() -> None:
    """Remove the run directories of supervisors that were killed too hard to remove their own.

    Such a supervisor's process is gone and its lock free. Neither says enough alone: a live supervisor is not seen in
    ``/proc`` from another container that shares the folder, nor with ``hidepid``; one that has just made its directory
    has not locked it yet.
    """
    for path in run_dir_parent().glob(f"{PREFIX}*-*"):
        pid = path.name.removeprefix(PREFIX).split("-")[0]
        # Another process that starts at this moment may have removed it.
        with suppress(FileNotFoundError, NotADirectoryError):
            if pid.isdecimal() and path.lstat().st_uid == os.getuid() and not Path("/proc", pid).exists():
                _remove_unlocked(path)


def _remove_unlocked(path: Path) -> None:
    lock = _open(path)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    except BlockingIOError:
        pass  # its supervisor lives
    finally:
        os.close(lock)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
