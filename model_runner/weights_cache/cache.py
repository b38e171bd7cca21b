"""Packed weights of this user's instances, in a private folder: each model is packed once and mapped by all.

Life of a file:

- One builder locks ``NAME.part`` and writes it.
- It is renamed to ``NAME.weights`` when it is whole and on the disk.
- Any number of instances map it.
- Whenever a model is packed, files are removed that were not used for a week. So are those of models that have changed
  or are gone.

A builder that is killed leaves a ``.part`` that the next one overwrites. Nothing in a file is trusted before its owner,
its mode and its digest are checked.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from ...model_files.errors import InvalidWeights
from ...runtime.file_lock import try_lock
from ...runtime.private_cache import cache_folder, publish
from ...runtime.trusted_path import distrust, make_private_folder
from ..cpu_engine.packed_model import BODY, DamagedWeights, PackedModel, read_contents
from ..cpu_engine.weight_memory import check_room, make_memory, map_file, take_memory
from .request import PackRequest, WeightsName

log = logging.getLogger(__name__)

OFF = "off"
"""Value of ``--weights-cache`` for no cache."""
UNUSED_SECONDS = 7 * 86400.0
"""Age of a file's last use at which it is removed."""
POLL_SECONDS = 0.05
MIB = 2**20


class Builder(Protocol):
    """Packs models."""

    def build(self, request: PackRequest, fd: int) -> None:
        """Load and pack the model into the empty file ``fd``; return when it is written.

        Raises ``ModelError`` or ``OSError``.
        """
        ...


class WeightsSource(Protocol):
    """Where an engine gets a packed model from."""

    def open(self, request: PackRequest) -> PackedModel:
        """Return the packed model in memory, after packing it if necessary. Raises ``ModelError`` or ``OSError``."""
        ...


class PrivateWeights:
    """Packs a model into memory of this process alone."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder

    def open(self, request: PackRequest) -> PackedModel:
        """Pack the model into new memory of this process, and return it.

        Raises ``InvalidWeights`` if the result is damaged.
        """
        fd = make_memory()
        try:
            self._builder.build(request, fd)
            return PackedModel(take_memory(fd), request.name().key)
        except DamagedWeights as e:
            raise InvalidWeights(f"the weights were damaged as they were packed: {e}") from e
        finally:
            os.close(fd)


class CachedWeights:
    """Maps packed models from a folder, and packs those that are missing or damaged."""

    def __init__(self, folder: Path, builder: Builder, timeout: float) -> None:
        """Keep packed models in ``folder``, and pack missing ones by ``builder``.

        ``timeout``: seconds to wait for another process that packs the same model.
        """
        self._folder = folder
        self._builder = builder
        self._timeout = timeout
        self._private = PrivateWeights(builder)

    def open(self, request: PackRequest) -> PackedModel:
        """Return the packed model, mapped from the folder; pack it into the folder first if it is missing or damaged.

        If the folder can't be used, log a warning and pack into memory of this process alone. Raises ``InvalidWeights``
        if another process is still packing it after ``timeout``.
        """
        name = request.name()
        begin = time.monotonic()
        try:
            packed = self._map(name)
            if packed is None:
                make_private_folder(self._folder)
                packed = self._pack(name, request)
        except OSError as e:
            log.warning(
                "packed weights can't be shared in %s (%s): this process packs its own copy; choose another folder "
                "with --weights-cache",
                self._folder,
                e.strerror or e,
            )
            return self._private.open(request)
        seconds = time.monotonic() - begin
        if packed.memory.page_cache:
            log.info("the weights may leave memory if the host runs short of it: raise ulimit -l above their size")
        log.info(
            "packed weights: %.1f MiB, shared in %s, after %.2f s", packed.memory.total / MIB, self._folder, seconds
        )
        return packed

    def _pack(self, name: WeightsName, request: PackRequest) -> PackedModel:
        part = self._folder / f"{name.key}.part"
        with self._locked(part) as fd:
            # Another process may have packed it meanwhile.
            packed = self._map(name, tell=True)
            if packed is not None:
                part.unlink()
                return packed
            try:
                os.ftruncate(fd, 0)
                # Before anything is loaded; the builder looks again when it knows the size.
                check_room(fd, request.source_bytes)
                self._builder.build(request, fd)
                publish(part, self._path(name))
            except BaseException:
                # Broad: whatever ends the packing, an interrupt included, half a file must not stay.
                part.unlink(missing_ok=True)
                raise
            self._remove_old(name)
        packed = self._map(name, tell=True)
        if packed is None:
            raise OSError(errno.EIO, "the file was damaged as it was written")
        return packed

    def _map(self, name: WeightsName, *, tell: bool = False) -> PackedModel | None:
        """Map the packed file, or return None if there is none that can be used. Raises ``OSError``.

        ``tell``: whether to log what is wrong with it.
        """
        path = self._path(name)
        try:
            if reason := distrust(self._folder.stat()):
                raise PermissionError(errno.EPERM, reason, str(self._folder))
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as e:
            if e.errno != errno.ELOOP:
                raise
            # A link: packing replaces it.
            return None
        try:
            state = os.fstat(fd)
            reason = distrust(state) or ("" if stat.S_ISREG(state.st_mode) else "it is not a file")
            if reason:
                raise DamagedWeights(reason)
            if state.st_size < BODY:
                raise DamagedWeights(f"it has {state.st_size} bytes and no header")
            packed = PackedModel(map_file(fd), name.key)
            with suppress(OSError):  # a folder that is read-only
                os.utime(fd)
        except DamagedWeights as e:
            if tell:
                log.warning("%s is not used: %s; the weights are packed again", path, e)
            return None
        finally:
            os.close(fd)
        return packed

    def _path(self, name: WeightsName) -> Path:
        return self._folder / f"{name.key}.weights"

    @contextmanager
    def _locked(self, part: Path) -> Iterator[int]:
        """Create or open ``part``, the file that a packed model is written to, take its lock, and yield its descriptor.

        The descriptor is closed afterwards. A builder that inherits it holds the lock, too. Raises ``InvalidWeights``
        if another process still has the lock after ``timeout`` seconds.
        """
        deadline, waits = time.monotonic() + self._timeout, False
        while True:
            fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                if try_lock(fd) and is_at(fd, part):
                    yield fd
                    return
            finally:
                os.close(fd)
            if not waits:
                log.info("another process is packing the same weights; waiting for it")
                waits = True
            if time.monotonic() > deadline:
                raise InvalidWeights(
                    f"another process has been packing the weights for {self._timeout:.0f} s ({part}); end it, or "
                    f"start with --weights-cache {OFF}"
                )
            time.sleep(POLL_SECONDS)

    def _remove_old(self, name: WeightsName) -> None:
        """Remove packed models that were not used for a week, and those with files that have changed or are gone.

        ``name``: the model packed just now; its packed weights from an older state of its files are removed. Files that
        a builder writes stay.
        """
        oldest = time.time() - UNUSED_SECONDS
        for path in (*self._folder.glob("*.weights"), *self._folder.glob("*.part")):
            model, _, rest = path.stem.partition("-")
            has_changed = model == name.model and not rest.startswith(f"{name.source}-")
            with suppress(OSError):
                if has_changed or path.lstat().st_mtime < oldest or is_orphan(path):
                    remove_unlocked(path)


def weights_folder(option: str | None) -> Path | None:
    """Return the folder that ``--weights-cache`` names, or the default one if it is not set; None if it is "off"."""
    if option == OFF:
        return None
    return cache_folder() / "weights" if option is None else Path(option).expanduser().absolute()


def is_at(fd: int, path: Path) -> bool:
    """Return whether the open file ``fd`` is still the one at ``path``, and not one that was renamed or removed."""
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


def is_orphan(path: Path) -> bool:
    """Return whether packed weights are damaged, or the model that they were made from is gone. Raises ``OSError``.

    For a ``.part`` file, return False.
    """
    if path.suffix != ".weights":
        return False
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return not os.path.exists(read_contents(fd).source)
    except DamagedWeights:
        return True
    finally:
        os.close(fd)


def remove_unlocked(path: Path) -> None:
    """Remove the file at ``path``, unless a builder has its lock. Instances that map it keep it. Raises ``OSError``."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if try_lock(fd):
            path.unlink()
    finally:
        os.close(fd)
