"""Whether only this user, or root, can have put there what a folder or file holds."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
OTHERS = stat.S_IRWXG | stat.S_IRWXO


def distrust(state: os.stat_result) -> str:
    """Why the folder or file may hold what somebody else put there; "" where it can't.

    Take ``state`` from an open descriptor, or without following links, so that it is of what is used.
    """
    if reason := foreign(state):
        return reason
    if state.st_mode & OTHERS_WRITE:
        return "others than its owner may write there; chmod go-w it"
    return ""


def foreign(state: os.stat_result) -> str:
    """Why a folder or file is neither this user's nor root's; "" where it is."""
    if state.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {state.st_uid}, not to {os.geteuid()} who runs this server"
    return ""


def read_secret(path: str | Path) -> bytes:
    """What a file with keys or secrets holds.

    Raises ``PermissionError`` where somebody else owns it, who could change what it says at any time, and ``OSError``.
    """
    with Path(path).expanduser().open("rb") as file:
        state = os.fstat(file.fileno())
        # A pipe or a file without a name comes from whoever started this server.
        if stat.S_ISREG(state.st_mode) and (reason := foreign(state)):
            raise PermissionError(errno.EPERM, reason, str(path))
        return file.read()


def exposure(path: str | Path) -> str:
    """What is to be said of a file with keys or secrets that others may read or write; "" where they may not."""
    state = Path(path).expanduser().stat()
    if not (stat.S_ISREG(state.st_mode) and state.st_mode & OTHERS):
        return ""
    return f"others than its owner may read or write it (mode {stat.S_IMODE(state.st_mode):04o}): chmod 600 {path}"


def make_private_folder(folder: Path) -> None:
    """Make the folder, mode 0700, where it is missing. Raises ``PermissionError`` where somebody else owns it or may
    write into it, ``OSError`` where it can't be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # A link at its place is followed: who can make one there can do so with the folder above it, too.
    if reason := distrust(folder.stat()):
        raise PermissionError(errno.EPERM, reason, str(folder))
