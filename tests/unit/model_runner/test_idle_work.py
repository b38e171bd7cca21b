"""The worker's heap is trimmed while the worker is idle."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

from support.machine import limit

from pdserve.model_runner.idle_work import GROWN_BYTES, IDLE_MS, IdleHeap, IdleWork
from pdserve.model_runner.process import serve_frame

MIB = 1 << 20


class Process:
    """A process that keeps ``kept`` bytes and has ``free`` ones inside its heap."""

    def __init__(self) -> None:
        self.kept, self.free = 100 * MIB, 0
        self.trims = 0

    def size(self) -> int:
        return self.kept + self.free

    def trim(self) -> None:
        self.free = 0
        self.trims += 1


def idle(heap: IdleHeap) -> None:
    heap.used()
    assert heap.wait_ms == IDLE_MS
    heap.advance()
    assert heap.wait_ms == -1


def test_the_heap_is_trimmed_only_when_it_has_grown() -> None:
    process = Process()
    heap = IdleHeap(process.size, process.trim)
    assert heap.wait_ms == -1
    idle(heap)
    process.free = GROWN_BYTES
    idle(heap)
    assert process.trims == 0
    process.free += 1
    idle(heap)
    assert (process.trims, process.free) == (1, 0)


def test_small_growth_adds_up() -> None:
    process = Process()
    heap = IdleHeap(process.size, process.trim)
    for _ in range(10):
        process.free += GROWN_BYTES // 4
        idle(heap)
    assert process.trims == 2


def test_what_a_trim_leaves_is_needed() -> None:
    """Caches grow, and weights come back after a release. A trim after each request would slow down the next one."""
    process = Process()
    heap = IdleHeap(process.size, process.trim)
    process.kept += 2 * GROWN_BYTES
    for _ in range(3):
        idle(heap)
    assert process.trims == 1
    process.kept -= 2 * GROWN_BYTES  # at once, as large blocks are
    idle(heap)
    process.free = GROWN_BYTES + 1
    idle(heap)
    assert (process.trims, process.free) == (2, 0)


def test_committed_kv_memory_is_no_heap() -> None:
    process = Process()
    prefault = SimpleNamespace(wait_ms=-1, committed_privately=0)
    work = IdleWork.of(prefault, process.size, process.trim)
    for _ in range(3):
        prefault.committed_privately += 2 * GROWN_BYTES
        process.kept += 2 * GROWN_BYTES
        work.used()
        work.advance()
    assert process.trims == 0
    process.free = GROWN_BYTES + 1
    work.used()
    work.advance()
    assert process.trims == 1


def test_the_worker_trims_once_nothing_has_come_for_a_while() -> None:
    waits: list[int] = []
    commands: list[list[object]] = [["work"], [], [], ["work"], []]

    def receive(wait_ms: int) -> list[object]:
        waits.append(wait_ms)
        return commands.pop(0)

    process = Process()
    slices = [5, 0, -1]
    prefault = SimpleNamespace(advance=lambda: slices.pop(0))
    idle_work = IdleWork(prefault, IdleHeap(process.size, process.trim))
    worker = SimpleNamespace(steps=(), idle=idle_work, mover=SimpleNamespace(submit=lambda command: None))
    process.free = 2 * GROWN_BYTES
    while commands:
        prefault.wait_ms = slices[0]
        serve_frame(SimpleNamespace(recv=receive), SimpleNamespace(), worker)
    assert waits == [5, 5, 0, IDLE_MS, IDLE_MS]
    assert process.trims == 1


def test_memory_between_blocks_that_live_is_returned() -> None:
    program = (
        "from pdserve.runtime.malloc import trim\n"
        "from pdserve.runtime.machine.memory import private_bytes\n"
        "from pdserve.model_runner.idle_work import IdleHeap\n"
        "heap = IdleHeap()\n"
        "before = private_bytes()\n"
        "pieces = [bytes(60_000) for _ in range(2_000)]\n"
        "pieces = pieces[::100]\n"
        "kept = private_bytes() - before\n"
        "heap.used()\n"
        "heap.advance()\n"
        "print(kept, private_bytes() - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=limit(60), check=True
    )
    kept, left = map(int, done.stdout.split())
    assert kept > 80 * MIB, "the allocator returned it anyway: this test shows nothing"
    assert left < 20 * MIB
