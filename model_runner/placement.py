"""Where the worker's threads run: each compute thread on its own core, every other thread wherever there is room.

A forward pass is hundreds of short parallel regions, each of which ends when its last thread does. A compute thread
that shares its core stalls all the others for a scheduler tick, so with ``--cpus`` each is bound to one core, and
instances on one host are given different ones. The other threads (ZMQ's I/O thread, the transfer engine's) do short
work that must not queue behind a compute thread: they keep all cores that the process was allowed when it started.
Threads inherit the binding of the thread that starts them, hence the order in ``process.py``:

    channels open → ``confine`` → torch is imported → ``bind_compute_threads`` → model loads → ``floating``: engine
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ..runtime.cpu_list import PlacementError, parse_cpus

PARALLEL_GRAIN = 1 << 16


class Placement(NamedTuple):
    """``cpus``: the core of each of the ``threads`` compute threads, None for no binding. ``allowed``: all cores."""

    threads: int
    cpus: tuple[int, ...] | None
    allowed: frozenset[int]


def plan_placement(threads: int | None, cpus: str | None, allowed: frozenset[int]) -> Placement:
    """What the options mean for a process that may use the cores ``allowed``; raises ``PlacementError``."""
    if threads is not None and threads < 1:
        raise PlacementError(f"--threads {threads}: at least one thread computes")
    if cpus is None:
        return Placement(threads or len(allowed), None, allowed)
    cores = parse_cpus(cpus)
    if not allowed.issuperset(cores):
        raise PlacementError(f"--cpus {cpus}: this process may use only cores {sorted(allowed)}")
    count = threads or len(cores)
    if count > len(cores):
        raise PlacementError(f"--threads {count} do not fit --cpus {cpus}: compute threads share no core")
    return Placement(count, cores[:count], allowed)


def confine(placement: Placement) -> None:
    """Keep the calling thread, and all that it starts from now on, on the compute cores."""
    if placement.cpus is not None:
        os.sched_setaffinity(0, placement.cpus)


def bind_compute_threads(placement: Placement) -> list[int]:
    """Size torch's pool, start it, and bind the calling thread and each thread of the pool to its own core.

    Returns the kernel's ids of the bound threads, the calling one first; [] where nothing is to be bound. Raises
    ``PlacementError`` where the pool has not the threads that it should have.
    """
    # Imported here: OpenMP reads the process's cores when it is loaded, which must come after ``confine``.
    import torch

    torch.set_num_threads(placement.threads)
    if placement.cpus is None:
        return []
    before = _threads()
    torch.ones(placement.threads * PARALLEL_GRAIN).sin_()
    pool = sorted(_threads() - before)
    if len(pool) != placement.threads - 1:
        raise PlacementError(f"torch started {len(pool)} threads where {placement.threads - 1} were expected")
    bound = [threading.get_native_id(), *pool]
    for thread, cpu in zip(bound, placement.cpus, strict=True):
        os.sched_setaffinity(thread, {cpu})
    return bound


@contextmanager
def floating(placement: Placement) -> Iterator[None]:
    """Threads that are started inside may run on every core that the process was allowed when it started."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, placement.allowed)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def _threads() -> set[int]:
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}
