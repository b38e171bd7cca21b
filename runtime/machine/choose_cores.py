"""The choice of cores for compute threads: one of each physical core, no efficiency cores, never beyond the quota.

Two threads on one physical core share its vector units and gain nothing. An efficiency core keeps all others waiting at
every barrier. With more threads than the CPU quota allows, all of them stop together for the rest of each period.
"""

from __future__ import annotations

from typing import NamedTuple

from .topology import Machine


class ComputeCores(NamedTuple):
    """``nodes``: the cores worth a thread by NUMA node, in order. ``notes``: what was left out, and why."""

    nodes: dict[int, tuple[int, ...]]
    notes: tuple[str, ...]

    @property
    def total(self) -> int:
        """Number of cores of all nodes."""
        return sum(map(len, self.nodes.values()))

    @property
    def best_node(self) -> int:
        """NUMA node with the most cores; the first one if there are several."""
        return max(self.nodes, key=lambda node: len(self.nodes[node]))


def compute_cores(machine: Machine) -> ComputeCores:
    """Choose cores for compute threads: one of each physical core that ``machine`` allows, at least one.

    Efficiency cores are left out if there are others.
    """
    notes = [f"{len(machine.allowed)} allowed"]
    first = frozenset(cpu for cpu in machine.allowed if cpu == min(machine.siblings[cpu] & machine.allowed))
    if siblings := len(machine.allowed) - len(first):
        notes.append(f"{siblings} {'is an' if siblings == 1 else 'are'} SMT sibling{'s' * (siblings > 1)}")
    # On efficiency cores alone, those have to do.
    fast = first - machine.slow or first
    if slow := len(first) - len(fast):
        notes.append(f"{slow} {'is an efficiency core' if slow == 1 else 'are efficiency cores'}")
    nodes = {node: tuple(sorted(cores & fast)) for node, cores in machine.nodes.items() if cores & fast}
    return ComputeCores(nodes, tuple(notes))


def within_quota(threads: int, quota: float | None) -> int:
    """Limit ``threads`` to a CPU quota, rounded down, but at least one: a stopped thread stops all others."""
    return threads if quota is None else min(threads, max(1, int(quota)))


def quota_note(quota: float) -> str:
    """Describe a CPU quota, in cores, for a line of the start-up log."""
    return f"a CPU quota of {quota:g} core{'s' * (quota != 1)}"
