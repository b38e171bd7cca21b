"""Whether only this user, or root, can have put there what a folder or file holds."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def distrust(state: os.stat_result) -> str:
    """Why the folder or file may hold what somebody else put there; "" where it can't.

    Take ``state`` from an open descriptor, or without following links, so that it is of what is used.
    """
    if state.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {state.st_uid}, not to {os.geteuid()} who runs this server"
    if state.st_mode & OTHERS_WRITE:
        return "others than its owner may write there; chmod go-w it"
    return ""


def make_private_folder(folder: Path) -> None:
    """Make the folder, mode 0700, where it is missing. Raises ``PermissionError`` where somebody else owns it or may
    write into it, ``OSError`` where it can't be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # A link at its place is followed: who can make one there can do so with the folder above it, too.
    if reason := distrust(folder.stat()):
        raise PermissionError(errno.EPERM, reason, str(folder))
