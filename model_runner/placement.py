"""Where the worker's threads run: compute threads each on a core of their own, every other thread wherever there is room.

A forward pass is hundreds of short parallel regions that end when the last thread does. A compute thread that shares its core
therefore stalls all the others for a scheduler tick, so with ``--cpus`` each is bound to one core; instances on one host
are given different ones. The rest (ZMQ's I/O thread, the transfer engine) is short work that must not queue behind a
bound thread: it keeps the cores that the process was allowed when it started. Threads inherit the binding of the thread that
starts them, hence the order in ``model_runner.process``:

    channels open → ``confine`` → torch is imported, the model loads → ``bind_compute_threads`` → ``floating``: engine starts
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

PARALLEL_GRAIN = 1 << 16


class PlacementError(ValueError):
    """``--threads`` and ``--cpus`` ask for what this process can't have; the message says what would do."""


class Placement(NamedTuple):
    """``cpus``: the core of each of the ``threads`` compute threads, None for no binding. ``allowed``: cores at the start."""

    threads: int
    cpus: tuple[int, ...] | None
    allowed: frozenset[int]


def parse_cpus(text: str) -> tuple[int, ...]:
    """Cores in a list like "0,2-3", in the order given; raises ``PlacementError``."""
    cpus: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise PlacementError(f'--cpus {text}: "{part}" is neither a core nor a range; write it like 0,2-3')
        cpus.extend(range(int(first), int(last if dash else first) + 1))
    if len(set(cpus)) != len(cpus) or not cpus:
        raise PlacementError(f"--cpus {text}: name each core once")
    return tuple(cpus)


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
    bound = [_current_thread(), *pool]
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


def _current_thread() -> int:
    return int(Path("/proc/thread-self").resolve().name)
