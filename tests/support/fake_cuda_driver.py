"""Replacement for ``backends/cuda_driver.py``: shared memory of the host is what another process may map.

Exported memory becomes shared where it lies, unless it is already. Its pages are put into a file without a name, after
others, and mapped over what was there. So existing views stay valid, and another process opens the file by its
descriptor.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

import pytest

from pdserve.disaggregation.errors import LinkLost
from pdserve.disaggregation.transfer.backends.ipc_driver import DeviceCopy, Export
from pdserve.mem_cache.kv_pages.region import RegionError

BACKENDS = "pdserve.disaggregation.transfer.backends"
HANDLE = struct.Struct("<IIQQ")
"""Process, descriptor, bytes of the file, and of what lies before the pool."""
BEFORE = 2 * mmap.PAGESIZE
"""Bytes of the allocation before the pool: other tensors may lie there."""
MAP_SHARED, MAP_FIXED = 0x01, 0x10
READ_WRITE = 0x3
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = (*[ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3], ctypes.c_long)
LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
FAILED = ctypes.c_void_p(-1).value


class FakeDriver:
    """``holds``: nothing that is queued is carried out. ``breaks``: copies are refused. ``opened``: bytes of what is
    mapped, by address. ``copied``: bytes of each call.
    """

    made: list[FakeDriver]
    """All of a process."""

    def __init__(self, ordinal: int) -> None:
        self.device = b"GPU%d" % ordinal
        self.holds = self.breaks = False
        self.opened: dict[int, int] = {}
        self._begins: dict[int, int] = {}
        self.copied: list[int] = []
        self.is_closed = False
        self._exports: dict[int, Export] = {}
        self._own: list[int] = []
        self._queued: list[Sequence[DeviceCopy]] = []
        self._apart: set[bytes] = set()
        self.made.append(self)

    def export(self, address: int, nbytes: int) -> Export:
        if address % mmap.PAGESIZE:
            raise RegionError("no other process can be given the KV pool")
        if address not in self._exports:
            found = shared(address)
            fd, before = found or share(address, nbytes)
            if found is None:
                self._own.append(fd)
            self._exports[address] = Export(HANDLE.pack(os.getpid(), fd, before + nbytes, before), before)
        return self._exports[address]

    def why_not(self, device: bytes) -> str:
        return f"{device.decode()} can't be reached" if device in self._apart else ""

    def part_from(self, device: bytes) -> None:
        self._apart.add(device)

    def open(self, handle: bytes) -> int:
        pid, theirs, nbytes, before = HANDLE.unpack(handle)
        try:
            fd = os.open(f"/proc/{pid}/fd/{theirs}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as e:
            raise LinkLost(f"the peer's memory can't be mapped: {e.strerror}") from e
        address = LIBC.mmap(None, nbytes, READ_WRITE, MAP_SHARED, fd, 0)
        os.close(fd)
        assert address != FAILED
        self.opened[address], self._begins[address] = nbytes, address + before
        return address

    def shut(self, address: int) -> None:
        assert not self._queued
        assert LIBC.munmap(address, self.opened.pop(address)) == 0

    def copy(self, pieces: Sequence[DeviceCopy]) -> Sequence[DeviceCopy]:
        if self.breaks:
            raise LinkLost("not taken")
        for target, _, nbytes in pieces:
            maps = self.opened.items()
            within = [at for at, size in maps if self._begins[at] <= target and target + nbytes <= at + size]
            assert within, "a copy to what is not the peer's pool"
        self._queued.append(pieces)
        return pieces

    def is_done(self, ticket: Sequence[DeviceCopy]) -> bool:
        if self.holds:
            return False
        for pieces in self._queued:
            for target, source, nbytes in pieces:
                ctypes.memmove(target, source, nbytes)
            self.copied.append(sum(piece.nbytes for piece in pieces))
        self._queued.clear()
        return True

    def close(self) -> None:
        self.is_closed = True
        for fd in self._own:
            os.close(fd)


FakeDriver.made = []


def shared(address: int) -> tuple[int, int] | None:
    """Return the descriptor of a file that is mapped at ``address`` from its begin on, and 0. None if there is none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, begin, _, inode, *_ = line.split()
        if int(span.split("-")[0], 16) == address and access[3] == "s" and int(begin, 16) == 0 and inode != "0":
            return next(fd for fd in map(int, os.listdir("/proc/self/fd")) if is_file(fd, int(inode))), 0
    return None


def is_file(fd: int, inode: int) -> bool:
    try:
        return os.fstat(fd).st_ino == inode
    except OSError:  # of the listing itself
        return False


def share(address: int, nbytes: int) -> tuple[int, int]:
    """Put this memory into a file, behind ``BEFORE`` bytes; returns its descriptor, and them."""
    fd = os.memfd_create("fake-gpu", os.MFD_CLOEXEC)
    os.ftruncate(fd, BEFORE + nbytes)
    kept = memoryview((ctypes.c_ubyte * nbytes).from_address(address))
    assert os.pwrite(fd, kept, BEFORE) == nbytes
    assert LIBC.mmap(address, nbytes, READ_WRITE, MAP_SHARED | MAP_FIXED, fd, BEFORE) == address
    return fd, BEFORE


def load_driver() -> Callable[[int], FakeDriver]:
    return FakeDriver


def install(monkeypatch: pytest.MonkeyPatch) -> list[FakeDriver]:
    """Have the cuda_ipc backend find this in the driver's place; returns the drivers that it makes."""
    monkeypatch.setitem(sys.modules, f"{BACKENDS}.cuda_driver", sys.modules[__name__])
    monkeypatch.setattr(FakeDriver, "made", [])
    name = f"{BACKENDS}.cuda_ipc"
    sys.modules.pop(name, None)
    module = import_module(name)
    # Gone again behind the test.
    del sys.modules[name]
    monkeypatch.setitem(sys.modules, name, module)
    return FakeDriver.made


IMPORT_PATH = os.pathsep.join(map(str, (Path(__file__).parent / "fake_cuda", Path(__file__).parents[1])))
"""What a process needs in PYTHONPATH that shall have this in the driver's place."""
