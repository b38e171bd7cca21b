"""Sessions as files: one per session, in a folder for each owner. Instances on one host or several may share the
folders.

Life of a file:
- written beside its place, and flushed to the disk;
- renamed into place, over an older one of the name;
- read, which changes nothing;
- removed by its owner, or when its time is over.

A process that is killed meanwhile leaves an unfinished file. A later write removes it when it is an hour old.

A file is two frames (``mem_cache/storage/frame.py``). The first is what lists show of the session, under a digest of
owner and name. The second is its state, under a digest of the first. So a file that was cut, changed or put under
another name or owner is detected before any of it is used. The checksums are no signature: every process that may write
to the folder is trusted.

Calls block; the HTTP process makes them in threads.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import msgspec

from ....mem_cache.storage.frame import HEADER_BYTES, BadFrame, check, header
from ....messages.decode import UndeclaredMessage, decode
from ....messages.sessions import SessionState
from ....runtime.file_lock import lock_within
from ....runtime.trusted_path import distrust, make_private_folder
from ....runtime.web.keys import ADMIN
from ....runtime.web.keys import NAME as KEY_NAME

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""A session's name: no folder, no hidden file, and no characters with a meaning in paths."""
WANTED_NAME = "has up to 128 letters, digits, dots, dashes and underscores, and begins with one of the first two"
SUFFIX = ".session"
UNFINISHED = "unfinished-"
NO_FILE = "it is no file"
MAX_FILE_BYTES = 64 << 20
MAX_INFO_BYTES = 4096
MAX_SESSIONS = 1024
"""Maximum number of sessions of one owner."""
ABANDONED_SECONDS = 3600.0
LOCK_SECONDS = 10.0
"""Seconds to wait while another instance writes."""
DIGEST_BYTES = 16
_LENGTH_BYTES = 4


class SessionError(Exception):
    """A session that does not exist or can't be used; ``status``: HTTP's. The message says what to do."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class SessionInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What lists show of a session. Times are Unix's.

    ``kv_tokens``: how many of its first tokens had their KV in the store when it was saved, ``kv_bytes`` long.
    """

    name: str
    owner: str
    created: float
    expires: float
    model: str
    prompt_tokens: int
    output_tokens: int
    kv_tokens: int
    kv_bytes: int


class Session(NamedTuple):
    """One session, complete."""

    info: SessionInfo
    state: SessionState


_INFO = msgspec.msgpack.Decoder(SessionInfo)
_STATE = msgspec.msgpack.Decoder(SessionState)


class Listed(NamedTuple):
    """A file as a list shows it; ``info`` None: the file is damaged, or no session."""

    owner: str
    name: str
    info: SessionInfo | None
    nbytes: int


class SessionLimits(NamedTuple):
    """Limits on sessions, in bytes of files and of the KV kept for them: of all sessions (``total``), of one owner's
    (``quota``). ``ttl``: seconds.
    """

    total: int
    quota: int
    ttl: float


class SessionFiles:
    """Reads and writes the files of sessions. Every method raises ``SessionError``."""

    def __init__(self, folder: Path, limits: SessionLimits) -> None:
        """Make the folder with mode 0700, if it is missing.

        Raises ``OSError``, and ``PermissionError`` if other users own it or may write to it.
        """
        self._folder, self.limits = folder, limits
        make_private_folder(folder)

    def save(self, info: SessionInfo, state: SessionState) -> int:
        """Write a session to disk in place of an older one of its name, and return the size of its file in bytes.

        On failure the older one stays. Raises ``SessionError``: 413 if it is too large, 507 if its owner or the server
        has no room, 503 if another instance keeps the lock.
        """
        path = self._path(info.owner, info.name)
        content = _pack(info, state)
        if len(content) > MAX_FILE_BYTES:
            raise SessionError(413, f"the session is {len(content)} bytes long, the limit is {MAX_FILE_BYTES}")
        with self._io(), self._locked():
            path.parent.mkdir(mode=0o700, exist_ok=True)
            self._sweep()
            self._check_room(info, len(content))
            unfinished = path.parent / f"{UNFINISHED}{secrets.token_hex(8)}"
            fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                with os.fdopen(fd, "wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(fd)
                os.replace(unfinished, path)
            except BaseException:  # whatever ended the write, the unfinished file is of no use
                unfinished.unlink(missing_ok=True)
                raise
            _sync(path.parent)
        return len(content)

    def load(self, owner: str, name: str) -> Session:
        """Read a session of ``owner``.

        Raises ``SessionError``: 404 if it does not exist or has expired, 409 if it is damaged.
        """
        path = self._path(owner, name)
        try:
            with self._io():
                content = _read(path, MAX_FILE_BYTES)
            if content is None:
                raise _missing(name)
            session = _unpack(owner, name, content)
        except (BadFrame, UndeclaredMessage) as e:
            raise SessionError(409, f'session "{name}" is damaged and not used: {e}; delete it') from None
        if session.info.expires <= time.time():
            raise _missing(name)
        return session

    def find(self, owner: str, name: str) -> Session | None:
        """Read a session like ``load``, but return None if there is none or it is damaged."""
        try:
            return self.load(owner, name)
        except SessionError as e:
            if e.status not in (404, 409):
                raise
            return None

    def listed(self, owner: str | None) -> list[Listed]:
        """Return the sessions of ``owner``, or of all owners if it is None, sorted by name and without expired ones.

        A damaged session is listed without its ``info``.
        """
        now = time.time()
        with self._io():
            found = [listed for folder in self._folders(owner) for listed in _listed(folder)]
        return sorted((s for s in found if s.info is None or s.info.expires > now), key=lambda s: s.name)

    def remove(self, owner: str, name: str) -> Session | None:
        """Delete a session and return it, None if it was damaged. Raises ``SessionError`` 404 if there is none."""
        path = self._path(owner, name)
        try:
            session = self.load(owner, name)
        except SessionError as e:
            if e.status != 409:
                raise
            session = None
        with self._io():
            try:
                os.unlink(path)
            except FileNotFoundError:
                raise _missing(name) from None
            except IsADirectoryError:
                _remove_folder(path)
        return session

    def _path(self, owner: str, name: str) -> Path:
        if not NAME.fullmatch(name):
            raise SessionError(400, f"a session's name {WANTED_NAME}")
        if owner not in ("", ADMIN) and not KEY_NAME.fullmatch(owner):
            raise SessionError(400, "owner: no API key has such a name (GET /kv/sessions tells an admin the owners)")
        return self._folder / _folder_name(owner) / (name + SUFFIX)

    def _folders(self, owner: str | None) -> list[Path]:
        if owner is not None:
            return [self._folder / _folder_name(owner)]
        return [Path(e.path) for e in os.scandir(self._folder) if e.is_dir(follow_symlinks=False)]

    def _check_room(self, info: SessionInfo, nbytes: int) -> None:
        mine = total = count = 0
        for folder in self._folders(None):
            is_mine = folder.name == _folder_name(info.owner)
            for listed in _listed(folder):
                if is_mine and listed.name == info.name:
                    continue
                size = listed.nbytes + (listed.info.kv_bytes if listed.info is not None else 0)
                total += size
                mine += size if is_mine else 0
                count += is_mine
        needs = nbytes + info.kv_bytes
        if count >= MAX_SESSIONS:
            raise SessionError(
                507, f"{count} sessions are kept for you already; delete some (DELETE /kv/sessions/NAME)"
            )
        for limit, used, whose, flag in (
            (self.limits.quota, mine, "your sessions", "--kv-sessions-quota"),
            (self.limits.total, total, "all sessions", "--kv-sessions-size"),
        ):
            if used + needs > limit:
                text = f"it takes {needs} bytes with its KV, and {whose} take {used} of {limit} ({flag}); delete some"
                raise SessionError(507, text)

    def _sweep(self) -> None:
        """Delete the expired sessions of all owners, and unfinished files that are over an hour old."""
        now = time.time()
        for folder in self._folders(None):
            for entry in os.scandir(folder):
                with contextlib.suppress(FileNotFoundError):
                    is_old = now - entry.stat(follow_symlinks=False).st_mtime > ABANDONED_SECONDS
                    if entry.name.startswith(UNFINISHED) and is_old:
                        os.unlink(entry.path)
            for listed in _listed(folder):
                if listed.info is not None and listed.info.expires <= now:
                    (folder / (listed.name + SUFFIX)).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep all other instances from writing during the ``with`` block, so that the free room of a quota is known.

        Raises ``SessionError`` 503 if another instance keeps the lock for ``LOCK_SECONDS``.
        """
        fd = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            # Another instance may hang while it has the lock, and this wait keeps a thread that others need.
            if not lock_within(LOCK_SECONDS, fd):
                raise SessionError(503, f"another instance has been writing for {LOCK_SECONDS:g} s; try again")
            yield
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _io(self) -> Iterator[None]:
        try:
            yield
        except IsADirectoryError:
            raise SessionError(409, "a folder stands in its place; delete it (DELETE /kv/sessions/NAME)") from None
        except OSError as e:
            status = 507 if e.errno in (errno.ENOSPC, errno.EDQUOT) else 503
            raise SessionError(status, f"the folder of sessions can't be used: {e.strerror or e}") from e


def _missing(name: str) -> SessionError:
    return SessionError(404, f'there is no session "{name}" of yours here (GET /kv/sessions lists them)')


def _folder_name(owner: str) -> str:
    # The prefix keeps key names such as "." and ".." from being folder names themselves.
    return f"key-{owner}" if owner else "anybody"


def _pack(info: SessionInfo, state: SessionState) -> bytes:
    first, second = msgspec.msgpack.encode(info), msgspec.msgpack.encode(state)
    length = len(first).to_bytes(_LENGTH_BYTES, "little")
    head = header(_digest(info.owner, info.name), memoryview(first))
    return b"".join((length, head, first, header(_digest_of(first), memoryview(second)), second))


def _unpack_info(owner: str, name: str, content: bytes) -> tuple[SessionInfo, bytes]:
    """Check and decode the first frame of a file: return the ``SessionInfo``, and the bytes that it was decoded from.

    ``content``: the file, or its beginning. Raises ``BadFrame`` or ``UndeclaredMessage`` if it is damaged, or is not
    the session ``name`` of ``owner``.
    """
    begin = _LENGTH_BYTES + HEADER_BYTES
    length = int.from_bytes(content[:_LENGTH_BYTES], "little")
    if length > MAX_INFO_BYTES:
        raise BadFrame("it is no session's file")
    first = content[begin : begin + length]
    check(content[_LENGTH_BYTES:begin], _digest(owner, name), memoryview(first))
    return decode(_INFO, first, MAX_INFO_BYTES), first


def _unpack(owner: str, name: str, content: bytes) -> Session:
    info, first = _unpack_info(owner, name, content)
    begin = _LENGTH_BYTES + HEADER_BYTES + len(first)
    second = content[begin + HEADER_BYTES :]
    check(content[begin : begin + HEADER_BYTES], _digest_of(first), memoryview(second))
    return Session(info, decode(_STATE, second, MAX_FILE_BYTES))


def _digest(owner: str, name: str) -> bytes:
    return _digest_of(f"{owner}\0{name}".encode())


def _digest_of(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def _read(path: Path, limit: int) -> bytes | None:
    """Return at most the first ``limit`` bytes of a plain file, None if there is none.

    Raises ``BadFrame`` for anything else found there, such as a link, or a file that other users may write.
    """
    try:
        # Opening a pipe or a device without O_NONBLOCK could block.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as e:
        if e.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        if e.errno in (errno.ELOOP, errno.ENXIO):
            raise BadFrame(NO_FILE) from None
        raise
    state = os.fstat(fd)
    if not stat.S_ISREG(state.st_mode) or distrust(state):
        os.close(fd)
        raise BadFrame(NO_FILE)
    with os.fdopen(fd, "rb") as file:
        return file.read(limit)


def _listed(folder: Path) -> Iterator[Listed]:
    owner = folder.name.removeprefix("key-") if folder.name != "anybody" else ""
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return
    for entry in entries:
        name = entry.name.removesuffix(SUFFIX)
        if name == entry.name or not NAME.fullmatch(name):
            continue
        path = folder / entry.name
        try:
            content = _read(path, _LENGTH_BYTES + HEADER_BYTES + MAX_INFO_BYTES)
            if content is None:
                continue
            info: SessionInfo | None = _unpack_info(owner, name, content)[0]
        except (BadFrame, UndeclaredMessage):
            info = None
        with contextlib.suppress(FileNotFoundError):
            yield Listed(owner, name, info, path.lstat().st_size)


def _remove_folder(path: Path) -> None:
    """Remove a folder that stands in a session's place, if it is empty: its content is not this server's to delete.

    Raises ``SessionError`` 409 if it is not empty.
    """
    try:
        os.rmdir(path)
    except OSError as e:
        if e.errno != errno.ENOTEMPTY:
            raise
        text = f"a folder with something in it stands in its place; remove {path.parent.name}/{path.name} by hand"
        raise SessionError(409, text) from None


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
