"""The user's cache of files that can be made again, such as compiled kernels and packed weights.

A file there is used like code, so it must come from this user, and it must be whole:

- ``is_there`` refuses a file, or a folder, that another user may have written to.
- ``publish`` moves a finished file into place once its bytes are on the disk, so that a crash leaves all or nothing.
- ``publish_sealed`` keeps a digest beside the file, and ``is_whole`` compares it. A failing disk, or a copy that was
  cut off, can damage a file later.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path

from .trusted_path import distrust

SEAL = ".sha256"
"""Ending of the file that holds a file's digest; it replaces the file's own ending."""


def cache_folder() -> Path:
    """Return the user's folder for files that can be made again (XDG base directory specification).

    It may be missing.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "pdserve"


def is_there(path: Path) -> bool:
    """Return whether a cache has the file ``path``. A link is not a file.

    Raises ``PermissionError``, with the reason and the path to blame, if another user owns the file or its folder, or
    may write to them.
    """
    for place, state_of in ((path.parent, Path.stat), (path, Path.lstat)):
        try:
            state = state_of(place)
        except FileNotFoundError:
            return False
        if reason := distrust(state):
            raise PermissionError(errno.EPERM, reason, str(place))
    return stat.S_ISREG(state.st_mode)


def publish(made: Path, path: Path) -> None:
    """Move the finished file ``made``, of the same file system, to ``path``.

    Its bytes are on the disk before the name is, so a power cut leaves the old file or the whole new one.
    """
    # Whatever the umask is: no other user may write what this user's processes will use.
    made.chmod(made.stat().st_mode & ~0o022)
    _sync(made)
    os.replace(made, path)
    _sync(path.parent)


def publish_sealed(made: Path, path: Path) -> None:
    """Move the finished file ``made``, of the same file system, to ``path``, with its SHA-256 in a file beside it."""
    seal = _seal_of(made)
    seal.write_text(_digest(made), encoding="ascii")
    # The digest first: a file without one counts as damaged, and is made again.
    publish(seal, _seal_of(path))
    publish(made, path)


def is_whole(path: Path) -> bool:
    """Return whether the file ``path`` has the SHA-256 that ``publish_sealed`` wrote beside it. The whole file is read.

    Return False if one of the two files is missing.
    """
    try:
        return _seal_of(path).read_text(encoding="ascii", errors="replace") == _digest(path)
    except FileNotFoundError:
        return False


def _seal_of(path: Path) -> Path:
    return path.with_suffix(SEAL)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
