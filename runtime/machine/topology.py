"""What kinds of cores there are, and which of them this process may use."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ..cpu_list import parse_kernel_list
from .control_groups import SystemTree, cpu_quota, cpuset

SLOW_SHARE = 0.8
"""A core below this part of the best one's speed is an efficiency core. Favoured cores of one kind differ by 5 %; small
ones reach at most three quarters of the big ones."""


class Machine(NamedTuple):
    """The cores of this process's world, by number.

    ``siblings``: the cores that share a physical core with each allowed one, itself included. ``slow``: efficiency
    cores. ``nodes``: the allowed cores of each NUMA node that has any. ``quota``: cores' worth of time, None without a
    limit.
    """

    allowed: frozenset[int]
    siblings: dict[int, frozenset[int]]
    slow: frozenset[int]
    nodes: dict[int, frozenset[int]]
    quota: float | None


def read_machine(affinity: Iterable[int] | None = None, tree: SystemTree = SystemTree()) -> Machine:  # noqa: B008
    """Read from ``tree`` which cores this process may use, of which kinds they are, and its CPU quota.

    ``affinity``: numbers of the cores on which it may run; None: as the kernel says.
    """
    allowed = frozenset(os.sched_getaffinity(0) if affinity is None else affinity)
    # The kernel keeps the affinity within the cpuset. But it may show the host's files to a container. A cpuset without
    # any of our cores is not ours.
    allowed = (cpuset(tree) or allowed) & allowed or allowed
    folder = tree.sys / "devices/system/cpu"
    siblings = {cpu: _list(folder / f"cpu{cpu}/topology/thread_siblings_list") | {cpu} for cpu in allowed}
    return Machine(allowed, siblings, _slow(allowed, tree), _nodes(allowed, tree), cpu_quota(tree))


def _list(file: Path) -> frozenset[int]:
    return frozenset(parse_kernel_list(file.read_text())) if file.is_file() else frozenset()


def _slow(allowed: frozenset[int], tree: SystemTree) -> frozenset[int]:
    """Return the efficiency cores among ``allowed``; none if all cores are of one kind."""
    # Intel's hybrids name them.
    atoms = _list(tree.sys / "devices/cpu_atom/cpus")
    if atoms:
        return allowed & atoms
    # Arm's tell a capacity; elsewhere the highest frequency has to do.
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        files = {cpu: tree.sys / f"devices/system/cpu/cpu{cpu}" / name for cpu in allowed}
        if all(file.is_file() for file in files.values()):
            speeds = {cpu: int(file.read_text()) for cpu, file in files.items()}
            return frozenset(cpu for cpu, speed in speeds.items() if speed < SLOW_SHARE * max(speeds.values()))
    return frozenset()


def _nodes(allowed: frozenset[int], tree: SystemTree) -> dict[int, frozenset[int]]:
    """Return the allowed cores by NUMA node. All are in node 0 if the kernel's nodes do not have all of them."""
    files = (tree.sys / "devices/system/node").glob("node[0-9]*/cpulist")
    found = {int(file.parent.name.removeprefix("node")): allowed & _list(file) for file in files}
    nodes = {node: cores for node, cores in sorted(found.items()) if cores}
    return nodes if frozenset().union(*nodes.values()) == allowed else {0: allowed}
