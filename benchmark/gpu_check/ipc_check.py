"""What the ``cuda_ipc`` backend asks of the driver, by itself: a process maps memory of another one, and writes it."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import torch

from ...disaggregation.transfer.backends.cuda_driver import load_driver
from ...disaggregation.transfer.backends.ipc_driver import DeviceCopy
from .part import Part
from .record import Finding

PAGE, PAGES = 64 << 10, 4096
"""64 KiB each, 256 MiB together."""
ROUNDS = 5
SECONDS = 30.0


def check_ipc(part: Part) -> Finding:
    """Scattered pages from a pool of this process to one of another, which says what it has then; and how fast."""
    try:
        make = load_driver()
    except ImportError as e:
        return Finding("", f"not run: {e}")
    owner = subprocess.Popen([sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        handle, offset = owner.stdout.readline().split()
        driver, mine = make(0), _pattern(part.device)
        there = driver.open(bytes.fromhex(handle)) + int(offset)
        order = np.random.default_rng(0).permutation(PAGES)
        pieces = [DeviceCopy(there + PAGE * int(to), mine.data_ptr() + PAGE * i, PAGE) for i, to in enumerate(order)]
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(ROUNDS):
            ticket = driver.copy(pieces)
            while not driver.is_done(ticket):
                if time.perf_counter() - begin > SECONDS:
                    owner.kill()
                    return Finding("", f"a copy was not done in {SECONDS:.0f} s", ok=False)
        spent = time.perf_counter() - begin
        driver.shut(there - int(offset))
        owner.stdin.write("written\n")
        owner.stdin.flush()
        right = owner.stdout.readline().strip() == "right"
    rate = ROUNDS * PAGES * PAGE / spent / 1e9
    return Finding("", f"{'the same bytes' if right else 'OTHER BYTES'}; {rate:.0f} GB/s", "the same bytes", right)


def _pattern(device: torch.device) -> torch.Tensor:
    """[pages, int32s]: of every page its number, and where in it."""
    numbers = torch.arange(PAGES, dtype=torch.int32, device=device)[:, None] * (PAGE // 4)
    return numbers + torch.arange(PAGE // 4, dtype=torch.int32, device=device)


def main() -> None:
    """The owner: tells a handle and an offset, waits for a line, says whether its pages are what they should be."""
    device = torch.device("cuda", 0)
    pool = torch.zeros(PAGES, PAGE // 4, dtype=torch.int32, device=device)
    export = load_driver()(0).export(pool.data_ptr(), pool.nbytes)
    print(export.handle.hex(), export.offset, flush=True)
    sys.stdin.readline()
    order = torch.from_numpy(np.random.default_rng(0).permutation(PAGES)).to(device)
    print("right" if torch.equal(pool[order], _pattern(device)) else "wrong", flush=True)


if __name__ == "__main__":
    main()
