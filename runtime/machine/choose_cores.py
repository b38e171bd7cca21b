"""Which cores are worth a compute thread: one of each physical core, no efficiency cores, never beyond the quota.

Two threads on one physical core share its vector units and gain nothing. An efficiency core keeps all others waiting at
every barrier. Threads beyond a CPU quota are stopped for the rest of each period, all of them and together.
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
        """Of all nodes."""
        return sum(map(len, self.nodes.values()))

    @property
    def best_node(self) -> int:
        """The one with the most cores, the first of several."""
        return max(self.nodes, key=lambda node: len(self.nodes[node]))


def compute_cores(machine: Machine) -> ComputeCores:
    """What is worth a thread of all that ``machine`` allows; at least one core."""
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
    """``threads``, or as many as ``quota`` feeds: rounded down, as half a thread's stop is every other's, but one."""
    return threads if quota is None else min(threads, max(1, int(quota)))


def quota_note(quota: float) -> str:
    """How a start-up line speaks of a quota."""
    return f"a CPU quota of {quota:g} core{'s' * (quota != 1)}"
