"""Whether only this user, or root, can have put there what a folder or file holds."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
OTHERS = stat.S_IRWXG | stat.S_IRWXO
MAX_LINKS = 40
"""Maximum links on the way to a file, as in Linux."""


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
    """Return a message if a folder or file belongs to neither this user nor root; "" if it belongs to one of them."""
    if state.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {state.st_uid}, not to {os.geteuid()} who runs this server"
    return ""


def read_secret(path: str | Path) -> bytes:
    """Read a file with keys or secrets.

    Raises ``PermissionError`` if another user owns it, or a link on the way to it, and so could change it at any time.
    Raises ``OSError`` too.
    """
    place = place_of(path)
    with place.open("rb") as file:
        state = os.fstat(file.fileno())
        # A pipe or a file without a name comes from the program that started this server.
        if stat.S_ISREG(state.st_mode) and (reason := foreign(state)):
            raise PermissionError(errno.EPERM, reason, str(path))
        return file.read()


def read_regular(path: str | Path, limit: int) -> bytes:
    """Read a file that is read again while the process runs: a regular one that no other user can have written.

    ``limit``: maximum size in bytes. It does not wait for a pipe's writer, and takes nothing out of a pipe. Raises
    ``PermissionError`` if the file or a link on the way to it belongs to another user, or if others may write to the
    file. Raises ``OSError`` too: for other kinds of files, and for larger ones.
    """

    def without_waiting(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)

    with open(place_of(path), "rb", opener=without_waiting) as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file, and only such a file can be read again", str(path))
        if reason := distrust(state):
            raise PermissionError(errno.EPERM, reason, str(path))
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit} bytes", str(path))
    return content


def place_of(path: str | Path) -> Path:
    """Return the absolute path of a file without links, except for the names of devices and open descriptors.

    These names are links to what has no path. Only root makes them, unlike files in /dev/shm. Raises as
    ``without_links`` does.
    """
    place = Path(path).expanduser().absolute()
    if place.is_relative_to("/proc") or place.parent in (Path("/dev"), Path("/dev/fd")):
        return place
    return without_links(place)


def exposure(path: str | Path) -> str:
    """Return a warning if other users may read or write a file with keys or secrets; "" if they may not."""
    state = Path(path).expanduser().stat()
    if not (stat.S_ISREG(state.st_mode) and state.st_mode & OTHERS):
        return ""
    return f"others than its owner may read or write it (mode {stat.S_IMODE(state.st_mode):04o}): chmod 600 {path}"


def without_links(path: Path) -> Path:
    """Return the absolute path without links, as ``Path.resolve`` does. The end of the path may be missing.

    Raises ``PermissionError`` if a link on the way belongs to another user: it may lead elsewhere at any time. In a
    sticky folder such as /tmp, any user can make a link where a folder is missing. Raises ``OSError`` too.
    """
    done, links = Path("/"), 0
    left = list(reversed(path.absolute().parts[1:]))
    while left:
        part = left.pop()
        step = done.parent if part == ".." else done / part
        try:
            state = step.lstat()
        except FileNotFoundError:
            done = step
            continue
        if not stat.S_ISLNK(state.st_mode):
            done = step
            continue
        if reason := foreign(state):
            raise PermissionError(errno.EPERM, f"{step} is a link, and {reason}", str(path))
        links += 1
        if links > MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = Path(os.readlink(step))
        done = Path("/") if target.is_absolute() else done
        left.extend(reversed(target.parts[1:] if target.is_absolute() else target.parts))
    return done


def make_private_folder(folder: Path) -> None:
    """Make the folder with mode 0700, if it is missing.

    Raises ``PermissionError`` if another user owns it or a link on the way to it, or may write into it. Raises
    ``OSError`` if it cannot be made.
    """
    place = without_links(folder)
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    if reason := distrust(place.lstat()):
        raise PermissionError(errno.EPERM, reason, str(folder))
