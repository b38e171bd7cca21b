"""Whether only this user, or root, can have put there what a folder or file holds."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
OTHERS = stat.S_IRWXG | stat.S_IRWXO


def distrust(state: os.stat_result) -> str:
    """Return why another user may have written to a folder or file; "" if none can.

    Take ``state`` from an open descriptor, or without following links, so that it belongs to the file that is used.
    """
    if reason := foreign(state):
        return reason
    if state.st_mode & OTHERS_WRITE:
        return "others than its owner may write there; chmod go-w it"
    return ""


def foreign(state: os.stat_result) -> str:
    """Return an error if a folder or file belongs neither to this user nor to root; "" if it does."""
    if state.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {state.st_uid}, not to {os.geteuid()} who runs this server"
    return ""


def read_secret(path: str | Path) -> bytes:
    """Read a file with keys or secrets.

    Raises ``PermissionError`` if another user owns it and so could change it at any time, and ``OSError``.
    """
    with Path(path).expanduser().open("rb") as file:
        state = os.fstat(file.fileno())
        # A pipe or a file without a name comes from the program that started this server.
        if stat.S_ISREG(state.st_mode) and (reason := foreign(state)):
            raise PermissionError(errno.EPERM, reason, str(path))
        return file.read()


def exposure(path: str | Path) -> str:
    """Return a warning if other users may read or write a file with keys or secrets; "" if they may not."""
    state = Path(path).expanduser().stat()
    if not (stat.S_ISREG(state.st_mode) and state.st_mode & OTHERS):
        return ""
    return f"others than its owner may read or write it (mode {stat.S_IMODE(state.st_mode):04o}): chmod 600 {path}"


def make_private_folder(folder: Path) -> None:
    """Make the folder with mode 0700, if it is missing.

    Raises ``PermissionError`` if another user owns it or may write into it, and ``OSError`` if it cannot be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # A link in its place is followed. A user that can make one there can replace the parent folder, too.
    if reason := distrust(folder.stat()):
        raise PermissionError(errno.EPERM, reason, str(folder))
