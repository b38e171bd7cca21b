"""Check of what the ``cuda_ipc`` backend needs of the driver: a process maps memory of another one, and writes it.

It also shows what becomes of the one process when the other is killed.

    python -P -m tools.gpu_check.ipc_check owner|writer|bereft DEVICE [HANDLE OFFSET]
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import IO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pdserve.disaggregation.errors import LinkLost
from pdserve.disaggregation.transfer.backends.cuda_driver import load_driver
from pdserve.disaggregation.transfer.backends.ipc_driver import DeviceCopy, IpcDriver
from pdserve.mem_cache.kv_pages.region import allocate_region
from pdserve.runtime.python import python_command

from ..environment import environment
from .part import Part
from .record import Check, Finding

ROUNDS = 5
SECONDS = 30.0
"""Limit of each wait."""
AFTER_SECONDS = 0.3
"""Seconds after a writer's end in which nothing may land."""
MARK = 7


class Size(NamedTuple):
    """``page``: bytes."""

    page: int
    pages: int


def size_of(device: torch.device) -> Size:
    """Return the page size and number of pages of the test's memory: 256 MiB on a GPU, far less on the CPU."""
    return Size(64 << 10, 4096) if device.type == "cuda" else Size(4096, 16)


def checks(part: Part) -> Iterator[Check]:
    """Yield a name and a function for each check of memory shared between processes; the function runs the check."""
    yield "memory of the GPU mapped by another process, and written", lambda: _or_why_not(part, check_write)
    yield "a writer that is killed writes nothing after", lambda: _or_why_not(part, check_killed_writer)
    yield "a writer whose owner is killed goes on", lambda: _or_why_not(part, check_killed_owner)


def _or_why_not(part: Part, find: Callable[[torch.device], Finding]) -> Finding:
    try:
        load_driver()
    except ImportError as e:
        return Finding("", f"not run: {e}")
    return find(part.device)


def check_write(device: torch.device) -> Finding:
    """Write scattered pages from this process's memory into another process's. Check that it finds the right bytes.

    Report the speed, too.
    """
    size, driver = size_of(device), load_driver()(0)
    mine = _pattern(device)
    with _started("owner", device) as owner:
        stdin, stdout = _pipes(owner)
        pieces, base = _pieces(driver, mine, stdout.readline(), size)
        _synchronize(device)
        begin = time.perf_counter()
        for _ in range(ROUNDS):
            if not _copied(driver, pieces):
                owner.kill()
                return Finding("", f"a copy was not done in {SECONDS:.0f} s", ok=False)
        spent = time.perf_counter() - begin
        driver.shut(base)
        stdin.write("written\n")
        stdin.flush()
        right = stdout.readline().strip() == "right"
    driver.close()
    rate = ROUNDS * size.pages * size.page / spent / 1e9
    return Finding("", f"{'the same bytes' if right else 'OTHER BYTES'}; {rate:.0f} GB/s", "the same bytes", right)


def check_killed_writer(device: torch.device) -> Finding:
    """Check that no byte of this process's memory changes after the process that wrote it was killed."""
    driver, pool = load_driver()(0), _memory(device)
    export = driver.export(pool.data_ptr(), pool.nbytes)
    with _started("writer", device, export.handle.hex(), str(export.offset)) as writer:
        _, stdout = _pipes(writer)
        assert stdout.readline() == "writing\n"
        ended = os.pidfd_open(writer.pid)
        writer.kill()
        is_over = bool(select.select([ended], [], [], SECONDS)[0])
        os.close(ended)
        pool.fill_(MARK)
        _synchronize(device)
        time.sleep(AFTER_SECONDS)
        changed = int((pool != MARK).sum().item()) * pool.itemsize
    driver.close()
    reported = f"{changed} bytes in {AFTER_SECONDS:g} s" if is_over else f"it has not ended in {SECONDS:.0f} s"
    return Finding("", reported, "none", is_over and not changed)


def check_killed_owner(device: torch.device) -> Finding:
    """Check that a process can use its device after the process that owns the memory it wrote was killed.

    Another process tries it, because it may lose its device.
    """
    with _started("bereft", device) as bereft:
        try:
            reported = bereft.communicate(timeout=SECONDS)[0].strip().splitlines()
        except subprocess.TimeoutExpired:
            bereft.kill()
            reported = [f"silent for {SECONDS:.0f} s"]
    last = reported[-1] if reported else f"ended with {bereft.returncode}"
    return Finding("", last, "alive", last.startswith("alive"))


def main() -> None:
    """Run one of the check's other processes, as the first argument says: "owner", "writer" or "bereft".

    "bereft" outlives the owner of the memory that it writes.
    """
    device = torch.device(sys.argv[2])
    match sys.argv[1]:
        case "owner":
            _own(device)
        case "writer":
            _write_for_ever(device, *sys.argv[3:])
        case "bereft":
            _outlive(device)


def _own(device: torch.device) -> None:
    """Export memory and print its handle and offset.

    After a line of input, print whether it holds the expected pages.
    """
    pool = _memory(device)
    export = load_driver()(0).export(pool.data_ptr(), pool.nbytes)
    print(export.handle.hex(), export.offset, flush=True)
    sys.stdin.readline()
    print("right" if torch.equal(pool[torch.from_numpy(_order(device)).to(device)], _pattern(device)) else "wrong")


def _write_for_ever(device: torch.device, handle: str, offset: str) -> None:
    driver = load_driver()(0)
    mine = _pattern(device)
    pieces, _ = _pieces(driver, mine, f"{handle} {offset}", size_of(device))
    _synchronize(device)
    assert _copied(driver, pieces)
    print("writing", flush=True)
    while True:
        # Always something queued, so that it ends in the middle.
        for ticket in [driver.copy(pieces) for _ in range(ROUNDS)]:
            while not driver.is_done(ticket):
                pass


def _outlive(device: torch.device) -> None:
    """Write into another process's memory, kill that process, and write on. Print whether the device still works."""
    driver = load_driver()(0)
    mine = _pattern(device)
    with _started("owner", device) as owner:
        pieces, base = _pieces(driver, mine, _pipes(owner)[1].readline(), size_of(device))
        _synchronize(device)
        first = driver.copy(pieces)
        owner.kill()
        owner.wait()
        reported = "alive"
        try:
            for ticket in (first, driver.copy(pieces)):
                until = time.monotonic() + SECONDS / 3
                while not driver.is_done(ticket) and time.monotonic() < until:
                    pass
            driver.shut(base)
        except LinkLost as e:
            reported = f"alive, but: {e}"
    _synchronize(device)
    assert int(torch.ones(1000, device=device).sum().item()) == 1000
    print(reported, flush=True)


def _pieces(driver: IpcDriver, mine: Tensor, reported: str, size: Size) -> tuple[list[DeviceCopy], int]:
    """Map the owner's memory, and return a copy for each page of ``mine`` to its place there, and the mapped address.

    ``reported``: handle and offset, as the owner printed them.
    """
    handle, offset = reported.split()
    base = driver.open(bytes.fromhex(handle))
    there, here = base + int(offset), mine.data_ptr()
    places = enumerate(_order(mine.device).tolist())
    return [DeviceCopy(there + size.page * to, here + size.page * i, size.page) for i, to in places], base


def _copied(driver: IpcDriver, pieces: list[DeviceCopy]) -> bool:
    ticket, until = driver.copy(pieces), time.monotonic() + SECONDS
    while not driver.is_done(ticket):
        if time.monotonic() > until:
            return False
    return True


def _order(device: torch.device) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.random.default_rng(0).permutation(size_of(device).pages)


def _memory(device: torch.device) -> Tensor:
    """Return zeroed memory of the test's size on ``device``, as [pages, int32s]."""
    page, pages = size_of(device)
    if device.type == "cuda":
        return torch.zeros(pages, page // 4, dtype=torch.int32, device=device)
    return torch.frombuffer(allocate_region(page * pages, shared=False).buffer, dtype=torch.int32).view(pages, -1)


def _pattern(device: torch.device) -> Tensor:
    """Return memory [pages, int32s] on ``device`` in which every element is its own index."""
    page, pages = size_of(device)
    numbers = torch.arange(pages, dtype=torch.int32, device=device)[:, None] * (page // 4)
    return numbers + torch.arange(page // 4, dtype=torch.int32, device=device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _started(role: str, device: torch.device, *rest: str) -> subprocess.Popen[str]:
    command = python_command("-m", "tools.gpu_check.ipc_check", role, str(device), *rest)
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment())


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


if __name__ == "__main__":
    main()
