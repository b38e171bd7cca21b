"""KV pages as files of a folder, which instances of one host, or of several with a shared file system, may share.

Life of a file:

- written beside its place, under a name of this process;
- renamed into place, so that a reader finds all of it or nothing;
- its modification time is moved on when it is read, or far on if it is to be kept;
- removed when the folder has outgrown its limit, longest unused first, or at once if it is found bad.

A process that is killed leaves at most one unfinished file. The next one removes it when it is an hour old. Nothing is
flushed to the disk: the checksum finds files that a loss of power has damaged.

A file's name says how its page is framed. Instances with and without a key for sealed pages may share a folder. Neither
reads files of the other kind. Both count and evict them: the limit is the folder's, and pages from before a key was set
would otherwise stay for ever.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ...runtime.trusted_path import distrust, make_private_folder
from .base import PageStore, StoreFull, StoreMisconfigured, StoreRequest, StoreUnavailable, StoreUsage
from .frame import SUFFIXES, BadFrame, Framing

FULL = (errno.ENOSPC, errno.EDQUOT)
TOUCH_SECONDS = 60.0
"""A file read again within this time keeps its place in the order of eviction: a read need not be a write."""
ABANDONED_SECONDS = 3600.0
AFTER_EVICTION = 0.9
"""Fraction of the limit that an eviction leaves, so that the next one is not due at once."""
RECOUNT_SECONDS = 10.0
"""Minimum seconds between two evictions, unless the limit is exceeded twice over.

Other instances write to the folder, too, so each eviction counts its files anew, which takes a while.
"""


class _Found(NamedTuple):
    """A stored file."""

    used: float
    nbytes: int
    path: str


class FileStore(PageStore):
    """A store of pages as files; see the module. ``limit``: maximum bytes of the folder's pages together."""

    def __init__(self, folder: Path, page_bytes: int, limit: int, framing: Framing | None = None) -> None:
        super().__init__(page_bytes, framing)
        self._folder, self._limit = folder, limit
        # Other processes that write here may have our process id, in containers of their own.
        self._own = secrets.token_hex(8)
        self._names = itertools.count()
        self._bad = self._evicted = 0
        self._counted_at = float("-inf")
        try:
            make_private_folder(folder)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            self._remove_abandoned()
            files = list(self._files())
        except OSError as e:
            raise StoreMisconfigured(f"--hicache-storage-url {folder}: {e.strerror or e}") from e
        self._pages, self._nbytes = len(files), sum(f.nbytes for f in files)

    def exists(self, hashes: Sequence[bytes]) -> int:
        for i, page_hash in enumerate(hashes):
            try:
                self._path(page_hash).stat()
            except FileNotFoundError:
                return i
            except OSError as e:
                raise self._unavailable(e) from e
        return len(hashes)

    def get(self, hashes: Sequence[bytes], into: Sequence[memoryview]) -> int:
        for i, (page_hash, page) in enumerate(zip(hashes, into, strict=True)):
            try:
                if not self._read(page_hash, page):
                    return i
            except OSError as e:
                raise self._unavailable(e) from e
        return len(hashes)

    def set(self, hashes: Sequence[bytes], pages: Sequence[memoryview]) -> None:
        try:
            self._set(hashes, pages)
            is_due = time.monotonic() - self._counted_at >= RECOUNT_SECONDS
            if self._nbytes > self._limit and (is_due or self._nbytes > 2 * self._limit):
                self._evict(int(AFTER_EVICTION * self._limit))
        except OSError as e:  # of others' files as well, which an eviction may not be allowed to remove
            raise self._unavailable(e) from e

    def _set(self, hashes: Sequence[bytes], pages: Sequence[memoryview]) -> None:
        for page_hash, page in zip(hashes, pages, strict=True):
            try:
                self._write(page_hash, page)
            except OSError as e:
                if e.errno not in FULL:
                    raise
                self._evict(self._nbytes // 2)
                raise StoreFull(f"{self._folder}: {e.strerror}; make room, or set --hicache-storage-size") from e

    def remove(self, hashes: Sequence[bytes]) -> None:
        for page_hash in hashes:
            path = self._path(page_hash)
            try:
                self._remove(_Found(0.0, path.stat().st_size, str(path)))
            except FileNotFoundError:
                continue
            except OSError as e:
                raise self._unavailable(e) from e

    def probe(self) -> None:
        trial = self._folder / f"unfinished-{self._own}-{next(self._names)}"
        try:
            os.close(os.open(trial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            trial.unlink()
        except OSError as e:
            if e.errno not in FULL:
                raise self._unavailable(e) from e

    def keep(self, hashes: Sequence[bytes], until: float) -> int:
        for i, page_hash in enumerate(hashes):
            path = self._path(page_hash)
            try:
                changed = path.stat().st_mtime
                when = until or time.time()
                if (changed < when) if until else (changed > when):
                    os.utime(path, (when, when))
            except FileNotFoundError:
                return i
            except OSError as e:
                if e.errno not in (errno.EROFS, errno.EPERM, errno.EACCES):
                    raise self._unavailable(e) from e
        return len(hashes)

    def usage(self) -> StoreUsage:
        return StoreUsage(self._pages, self._nbytes, self._bad, self._evicted)

    def close(self) -> None:
        os.close(self._lock)

    def _path(self, page_hash: bytes) -> Path:
        name = page_hash.hex()
        return self._folder / name[:2] / (name + self.framing.suffix)

    def _read(self, page_hash: bytes, page: memoryview) -> bool:
        path = self._path(page_hash)
        try:
            # What is no file, as a pipe in its place, must not hold us up.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return False
        except OSError as e:
            if e.errno != errno.ELOOP:
                raise
            return self._spoilt(path, 0)  # a link, which is never made here
        try:
            state = os.fstat(fd)
            if not stat.S_ISREG(state.st_mode) or distrust(state):
                raise BadFrame("no file of ours")
            head = bytearray(self.framing.header_bytes)
            got = _read_all(fd, [memoryview(head), page])
            self.framing.check(bytes(head[:got]), page_hash, page[: max(0, got - len(head))])
        except BadFrame:
            return self._spoilt(path, state.st_size)
        finally:
            os.close(fd)
        if time.time() - state.st_mtime > TOUCH_SECONDS:
            self._touch(path)
        return True

    def _spoilt(self, path: Path, nbytes: int) -> bool:
        self._bad += 1
        self._remove(_Found(0.0, nbytes, str(path)))
        return False

    def _touch(self, path: Path) -> None:
        try:
            os.utime(path)
        except FileNotFoundError:
            pass  # evicted meanwhile, by us or by another instance
        except OSError as e:
            if e.errno not in (errno.EROFS, errno.EPERM, errno.EACCES):
                raise

    def _write(self, page_hash: bytes, page: memoryview) -> None:
        path = self._path(page_hash)
        if path.exists():
            return
        unfinished = self._folder / f"unfinished-{self._own}-{next(self._names)}"
        fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _write_all(fd, [memoryview(self.framing.header(page_hash, page)), page])
            path.parent.mkdir(mode=0o700, exist_ok=True)
            os.replace(unfinished, path)
        except BaseException:  # whatever ended the write, its half is of no use
            unfinished.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        self._pages += 1
        self._nbytes += self.framing.header_bytes + page.nbytes

    def _evict(self, goal: int) -> None:
        """Count the files of the folder anew, and remove those unused for longest until ``goal`` bytes are left.

        Nothing is removed if other instances have made enough room, or if another one evicts at this moment.
        """
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return  # another instance does it
        try:
            files = sorted(self._files())
            self._pages, self._nbytes = len(files), sum(f.nbytes for f in files)
            self._counted_at = time.monotonic()
            # Another instance may have made room meanwhile.
            is_needed = self._nbytes > min(goal / AFTER_EVICTION, self._limit)
            for found in files if is_needed else ():
                if self._nbytes <= goal:
                    break
                self._remove(found)
                self._evicted += 1
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _remove(self, found: _Found) -> None:
        try:
            os.unlink(found.path)
        except FileNotFoundError:
            return
        self._pages -= 1
        self._nbytes -= found.nbytes

    def _files(self) -> Iterator[_Found]:
        for folder in _entries(self._folder):
            if len(folder.name) != 2 or not folder.is_dir(follow_symlinks=False):
                continue
            for entry in _entries(folder.path):
                try:
                    state = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if entry.name.endswith(SUFFIXES):
                    yield _Found(state.st_mtime, state.st_size, entry.path)

    def _remove_abandoned(self) -> None:
        for entry in _entries(self._folder):
            if not entry.name.startswith("unfinished-"):
                continue
            try:
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > ABANDONED_SECONDS:
                    os.unlink(entry.path)
            except FileNotFoundError:
                continue

    def _unavailable(self, error: OSError) -> StoreUnavailable:
        return StoreUnavailable(f"{self._folder}: {error.strerror or error}")


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except FileNotFoundError:
        return []


def _read_all(fd: int, buffers: list[memoryview]) -> int:
    """Fill ``buffers``, which follow one another in the file, from its beginning, and return how many bytes were read.

    Raises ``BadFrame`` if the file is longer than they are.
    """
    surplus = memoryview(bytearray(1))
    wanted = [*buffers, surplus]
    got = 0
    while wanted:
        count = os.preadv(fd, wanted, got)
        if not count:
            return got
        got += count
        wanted = _behind(wanted, count)
    raise BadFrame("longer than a page")


def _write_all(fd: int, buffers: list[memoryview]) -> None:
    while buffers:
        buffers = _behind(buffers, os.writev(fd, buffers))


def _behind(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Return the rest of ``buffers`` after their first ``count`` bytes."""
    for i, buffer in enumerate(buffers):
        if count < buffer.nbytes:
            return [buffer[count:], *buffers[i + 1 :]]
        count -= buffer.nbytes
    return []


def open_file_store(request: StoreRequest) -> FileStore:
    """Open the store in the folder ``request.url``, and make the folder if necessary. Raises ``StoreMisconfigured``."""
    return FileStore(Path(request.url), request.page_bytes, request.limit, request.framing)
