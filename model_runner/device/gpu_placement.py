"""Placement of an instance with passes on a GPU.

Little is computed on the host: one thread launches kernels, others move pages. No thread is bound to a core, since each
instance of the host would choose the same one. Two launching threads on one core take turns of milliseconds. The
launching thread stays on the cores of the GPU's NUMA node and takes its memory from there. It moves to these cores when
all is loaded and compiled, since compilers inherit the cores of the thread that starts them.
"""

from __future__ import annotations

import logging

from ...runtime.machine.threads import place_thread
from ...runtime.machine.topology import Machine
from .placement import ThreadPlacement, prefer_memory_of

log = logging.getLogger(__name__)

MOST_THREADS = 8
"""Maximum threads of torch on the host: they load weights and compute little besides."""


def beside_gpu(placement: ThreadPlacement, *, named: bool) -> ThreadPlacement:
    """Return ``placement`` changed for a process that computes on a GPU: at most ``MOST_THREADS`` threads, none bound.

    ``named``: whether ``--cpus`` names the cores. The threads then stay on these, and else may run on all cores that
    this process may use.
    """
    threads = min(placement.threads, MOST_THREADS)
    where = "on the cores that --cpus names" if named else "bound to no core"
    return placement._replace(
        threads=threads,
        cpus=None,
        home=placement.home if named else placement.allowed,
        node=placement.node if named else None,
        reason=f"{threads} thread{'s' * (threads > 1)} beside the GPU, {where}",
    )


def prefer_node(node: int | None, machine: Machine) -> None:
    """Have new memory of the calling thread, and of those it starts, come from NUMA node ``node`` while it has any.

    Do nothing if ``node`` is None, if the host has one node, or if this process may use no core of it.
    """
    if node is not None and cores_near(node, machine):
        prefer_memory_of(node)


def stay_near(node: int | None, machine: Machine) -> None:
    """Keep the calling thread, and those that it starts, on the cores of NUMA node ``node``, and log that.

    Do nothing if ``node`` is None, if the host has one node, or if this process may use no core of it.
    """
    if node is not None and (cores := cores_near(node, machine)) and place_thread(0, cores):
        log.info("kernels are launched on the cores of NUMA node %d, which is the GPU's", node)


def cores_near(node: int, machine: Machine) -> frozenset[int]:
    """Return the cores of NUMA node ``node`` that this process may use; an empty set if the host has one node."""
    return machine.nodes.get(node, frozenset()) if len(machine.nodes) > 1 else frozenset()
