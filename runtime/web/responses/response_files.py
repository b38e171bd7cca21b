"""Kept responses as files of a folder, one file each. One server uses the folder at a time.

A file is written beside its place and renamed into it. It is not flushed to the disk: a response survives the death of
the process, and perhaps not that of the host. One thread writes and removes, in the order in which it is told.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import msgspec

from ...trusted_path import distrust, make_private_folder
from .response_store import KeptResponse

log = logging.getLogger(__name__)

SUFFIX = ".response"
UNFINISHED = "unfinished"
LOCK = "lock"
MAX_FILE_BYTES = 1 << 30


class ResponseFolderError(Exception):
    """A folder that can't be used; the message says why."""


class ResponseFiles:
    """Reads and writes the files of responses."""

    def __init__(self, folder: Path) -> None:
        """Make the folder with mode 0700, if it is missing, and lock it until the process ends.

        Raises ``ResponseFolderError`` if others may write to it, or another server uses it.
        """
        self._folder = folder
        try:
            make_private_folder(folder)
            self._lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ResponseFolderError(
                f"--responses-dir {folder}: another server uses this folder; give each server its own"
            ) from None
        except OSError as e:
            raise ResponseFolderError(f"--responses-dir {folder}: {e.strerror or e}") from e
        self._thread = ThreadPoolExecutor(1, "responses")
        self._unwritten: dict[Path, KeptResponse] = {}
        """Responses that wait for the thread. A slow disk holds up none that has been dropped."""

    def load(self) -> Iterable[KeptResponse]:
        """Yield the responses that are kept, the oldest first. A damaged file is left alone, and logged."""
        files = sorted(self._folder.glob(f"*{SUFFIX}"), key=lambda path: path.lstat().st_mtime_ns)
        for path in files:
            try:
                kept = _read(path)
                if path != self._path(kept):
                    raise ValueError("its name is that of another response")
            except (OSError, ValueError, msgspec.MsgspecError) as e:
                log.warning("%s is no kept response, and is left alone: %s", path, e)
            else:
                yield kept

    def write(self, kept: KeptResponse) -> None:
        """Write a response on the thread. A failure is logged: the response is then kept in memory alone."""
        path = self._path(kept)
        self._unwritten[path] = kept
        self._submit(lambda: self._write(path))

    def remove(self, kept: KeptResponse) -> None:
        """Remove a response's file on the thread. A failure is logged."""
        path = self._path(kept)
        self._unwritten.pop(path, None)
        self._submit(lambda: path.unlink(missing_ok=True))

    def close(self) -> None:
        """Wait until all is written, and unlock the folder."""
        self._thread.shutdown()
        os.close(self._lock)

    def _submit(self, work: Callable[[], None]) -> None:
        try:
            self._thread.submit(self._logged, work)
        except RuntimeError as e:
            self._log(e)  # the folder is closed: the server ends

    def _logged(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as e:
            self._log(e.strerror or e)
        except Exception as e:  # noqa: BLE001
            # It would vanish with the thread's future.
            self._log(repr(e))

    def _log(self, reason: object) -> None:
        log.error("--responses-dir %s: a response's file is not up to date: %s", self._folder, reason)

    def _write(self, path: Path) -> None:
        kept = self._unwritten.pop(path, None)
        if kept is None:
            return  # it was dropped, or an earlier write took it in place of an older one
        beside = self._folder / UNFINISHED
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "wb") as file:
            file.write(msgspec.msgpack.encode(kept))
        beside.replace(path)

    def _path(self, kept: KeptResponse) -> Path:
        return self._folder / (sha256(f"{kept.owner}\0{kept.id}".encode()).hexdigest()[:32] + SUFFIX)


def _read(path: Path) -> KeptResponse:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        if reason := distrust(os.fstat(file.fileno())):
            raise ValueError(reason)
        return msgspec.msgpack.decode(file.read(MAX_FILE_BYTES), type=KeptResponse)
