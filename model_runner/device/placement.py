"""Where the worker's threads run: compute threads on cores of their own, every other thread where there is room.

A forward pass is hundreds of short parallel regions, each of which ends when its last thread does. A compute thread
that shares its core stalls all the others for a scheduler tick. So there is one for each physical core of one NUMA
node (``runtime/machine``). They stay away from the SMT siblings, efficiency cores and other nodes.

If there are as many threads as cores, each is bound to one. Unbound, two may be put on one core, when one of them wakes
while another process has its core for a moment. They then take turns there for a tick or more beside an idle core.
Fewer threads are not bound, because an instance can't know whether it is alone: two instances bound to the first cores
would stall each other. ``--cpus`` assigns cores, and ``pdserve up`` passes it to its instances. The other threads
(ZMQ's I/O thread, the transfer engine's) do short work that must not queue behind a compute thread. They keep all cores
that the process was allowed when it started.

Memory lies where a thread first touches it, so bound threads alone would almost do. But the transfer engine's thread
is not bound, and it may be the first to touch a page of the pool. So the process also asks for its node's memory
first.

Threads inherit the binding and the memory policy of the thread that starts them, hence the order in ``process.py``:

    channels open → ``confine`` → model loads → ``bind_calling_thread`` → ``floating``: transfer engine

A torch engine calls ``start_torch_threads`` before its weights are loaded.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ...messages.worker import MachineUse
from ...runtime.cpu_list import ThreadPlacementError, format_cores, parse_cpus
from ...runtime.machine.choose_cores import ComputeCores, compute_cores, quota_note, within_quota
from ...runtime.machine.memory import Memory
from ...runtime.machine.threads import place_thread, set_niceness
from ...runtime.machine.topology import Machine

log = logging.getLogger(__name__)

PARALLEL_GRAIN = 1 << 16
SPIN_US = 300
"""Microseconds that a thread spins at a barrier before it sleeps.

Another process takes a core for about as long, and a thread that sleeps meanwhile wakes up late as well.
"""
CROWDED_SPIN_US = 1
"""Microseconds of spinning if threads outnumber cores or quota: the awaited thread can't run while this one spins."""
SYS_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
MPOL_PREFERRED = 1


class ThreadPlacement(NamedTuple):
    """``cpus``: the core of each of the ``threads`` compute threads, None for no binding. ``allowed``: all cores.

    ``home``: the cores that the compute threads stay on. ``node``: the NUMA node of all of these, None where there is
    one node or they lie on several. ``reason``: why so, for people. ``sharers``: processes that compute on these cores
    at once, with as many threads each.
    """

    threads: int
    cpus: tuple[int, ...] | None
    allowed: frozenset[int]
    home: frozenset[int]
    node: int | None
    quota: float | None
    reason: str
    sharers: int = 1

    @property
    def is_crowded(self) -> bool:
        """Whether the compute threads can't all run at once.

        That is so if the threads of all ``sharers``, the processes on these cores, exceed the cores. It is also so if
        this process's threads exceed its CPU quota.
        """
        return self.threads * self.sharers > len(self.home) or (self.quota is not None and self.threads > self.quota)

    @property
    def spin_us(self) -> int:
        """Microseconds that a compute thread spins at a barrier before it sleeps."""
        return CROWDED_SPIN_US if self.is_crowded else SPIN_US


def plan_placement(threads: int | None, cpus: str | None, machine: Machine) -> ThreadPlacement:
    """Return how many compute threads run on which cores of ``machine``; change nothing yet.

    ``threads``, ``cpus``: values of ``--threads`` and ``--cpus``, None to choose. Raises ``ThreadPlacementError``.
    """
    if threads is not None and threads < 1:
        raise ThreadPlacementError(f"--threads {threads}: at least one thread computes")
    if cpus is not None:
        return _bound(threads, cpus, machine)
    choice = compute_cores(machine)
    notes = list(choice.notes)
    cores = _home(choice, threads, machine, notes)
    count = threads or within_quota(len(cores), machine.quota)
    # A quota smaller than the cores is what guests of a host have that don't own its cores: they float.
    takes_all = count == len(cores) and (machine.quota is None or machine.quota >= count)
    return _placement(count, tuple(sorted(cores)) if takes_all else None, cores, machine, notes)


def _bound(threads: int | None, cpus: str, machine: Machine) -> ThreadPlacement:
    cores = parse_cpus(cpus)
    if not machine.allowed.issuperset(cores):
        raise ThreadPlacementError(f"--cpus {cpus}: this process may use only cores {sorted(machine.allowed)}")
    count = threads or within_quota(len(cores), machine.quota)
    if count > len(cores):
        raise ThreadPlacementError(f"--threads {count} do not fit --cpus {cpus}: compute threads share no core")
    return _placement(count, cores[:count], frozenset(cores[:count]), machine, ["--cpus says so"])


def _home(choice: ComputeCores, threads: int | None, machine: Machine, notes: list[str]) -> frozenset[int]:
    """Return the cores that the compute threads stay on, and add the reason to ``notes``.

    ``threads``: value of ``--threads``; None: it is not given. The cores are those of the best NUMA node if ``threads``
    fit there. Otherwise they are all cores worth a thread, or all allowed ones if those are too few.
    """
    node = choice.nodes[choice.best_node]
    wanted = threads or 1
    if wanted <= len(node):
        if others := choice.total - len(node):
            notes.append(f"{others} on other NUMA nodes")
        return frozenset(node)
    notes.append(f"--threads asks for {wanted}")
    worth = frozenset().union(*choice.nodes.values())
    return worth if wanted <= len(worth) else machine.allowed


def _placement(
    threads: int, cpus: tuple[int, ...] | None, home: frozenset[int], machine: Machine, notes: list[str]
) -> ThreadPlacement:
    nodes = [node for node, cores in machine.nodes.items() if cores & home]
    node = nodes[0] if len(nodes) == 1 < len(machine.nodes) else None
    if machine.quota is not None:
        notes.append(quota_note(machine.quota))
    where = f"{'on' if cpus is None else 'bound to'} core{'s' * (len(home) > 1)} {format_cores(cpus or sorted(home))}"
    if node is not None:
        where += f" of NUMA node {node}"
    reason = f"{threads} compute thread{'s' * (threads > 1)} {where}: {', '.join(notes)}"
    return ThreadPlacement(threads, cpus, machine.allowed, home, node, machine.quota, reason)


def machine_use(placement: ThreadPlacement, memory: Memory) -> MachineUse:
    """Return the threads, cores and memory that ``/server_info`` and the start-up line report for this worker.

    ``memory``: that of the host, within this process's control groups.
    """
    gib = f"{memory.free / 2**30:.1f} of {memory.total / 2**30:.1f} GiB of memory free"
    return MachineUse(
        threads=placement.threads,
        cores=list(placement.cpus or sorted(placement.home)),
        bound=placement.cpus is not None,
        allowed=sorted(placement.allowed),
        cpu_quota=placement.quota,
        numa_node=placement.node,
        spin_us=placement.spin_us,
        memory_total=memory.total,
        memory_free=memory.free,
        reason=f"{placement.reason}; {gib}",
    )


def confine(placement: ThreadPlacement) -> None:
    """Restrict the calling thread, and all that it starts later, to the compute cores; prefer their node's memory.

    If compute threads are crowded, also tell OpenMP by an environment variable not to spin.
    """
    if placement.home != placement.allowed:
        place_thread(0, placement.home)
    if placement.is_crowded:
        # Torch's own threads (the reference runs on them) spin between operations unless OpenMP, which knows nothing of
        # quotas, gets this variable before it is loaded.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if placement.node is not None:
        prefer_memory_of(placement.node)


def yield_cores(nice: int) -> None:
    """Set the nice value of the calling thread, and of all that it starts later, to ``nice``; 0 changes nothing."""
    if nice:
        set_niceness(nice)


def prefer_memory_of(node: int) -> None:
    """Have new memory of the calling thread, and of those it starts, come from NUMA node ``node`` while it has any.

    Only log it if the kernel refuses, as containers often do.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    number = SYS_SET_MEMPOLICY.get(platform.machine())
    words = node // 64 + 1
    mask = (ctypes.c_uint64 * words)()
    mask[node // 64] = 1 << node % 64
    # The kernel reads one bit less than this number.
    if number is None or libc.syscall(number, MPOL_PREFERRED, mask, ctypes.c_ulong(64 * words + 1)) != 0:
        # Containers often forbid it. The compute threads' own first touch still puts nearly everything there.
        log.info("memory of NUMA node %d can't be asked for: %s", node, os.strerror(ctypes.get_errno()))


def bind_calling_thread(placement: ThreadPlacement) -> None:
    """Bind the calling thread, which becomes the C++ engine's first compute thread, to the placement's first core.

    Do nothing if threads are not bound.
    """
    if placement.cpus is not None:
        place_thread(0, {placement.cpus[0]})


def start_torch_threads(placement: ThreadPlacement) -> list[int]:
    """Start torch's pool of ``placement.threads`` threads, the caller included, and bind each to its own core.

    Return the kernel's ids of the bound threads, the calling one first. If threads are not bound, only set their number
    and return []. Raises ``ThreadPlacementError`` if torch starts another number of threads.
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
        raise ThreadPlacementError(f"torch started {len(pool)} threads where {placement.threads - 1} were expected")
    bound = [threading.get_native_id(), *pool]
    for thread, cpu in zip(bound, placement.cpus, strict=True):
        place_thread(thread, {cpu})
    return bound


@contextmanager
def floating(placement: ThreadPlacement) -> Iterator[None]:
    """Let the calling thread, and threads that it starts within the context, run on all cores allowed at start-up.

    The calling thread returns to its own cores at the end; the others keep all.
    """
    own = os.sched_getaffinity(0)
    place_thread(0, placement.allowed)
    try:
        yield
    finally:
        place_thread(0, own)


def _threads() -> set[int]:
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}
