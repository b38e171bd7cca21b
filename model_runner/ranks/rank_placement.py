"""The cores of one rank among those of its host: a NUMA node each where there are enough, else as many cores each."""

from __future__ import annotations

from ...runtime.cpu_list import ThreadPlacementError, parse_cpus
from ...runtime.machine.choose_cores import compute_cores
from ...runtime.machine.topology import Machine
from ...runtime.ranks import RankPlace
from ..device.placement import ThreadPlacement, plan_placement


def plan_rank_placement(threads: int | None, cpus: str | None, machine: Machine, place: RankPlace) -> ThreadPlacement:
    """Return which cores the compute threads of one rank use, beside the other ranks of its host.

    ``threads`` and ``cpus``: options for all ranks of this host together, None to choose. Raises
    ``ThreadPlacementError``.
    """
    ranks = place.local_size
    if ranks == 1:
        return plan_placement(threads, cpus, machine)
    if threads is not None and threads < ranks:
        raise ThreadPlacementError(f"--threads {threads}: each of {ranks} ranks needs one")
    own_threads = None if threads is None else threads // ranks
    quota = None if machine.quota is None else machine.quota / ranks
    if cpus is not None:
        return plan_placement(own_threads, _own_cpus(cpus, place), machine._replace(quota=quota))
    cores = _own_cores(machine, place)
    if cores is None:
        return plan_placement(own_threads or 1, None, machine._replace(quota=quota))._replace(sharers=ranks)
    own = machine._replace(
        allowed=cores,
        siblings={cpu: machine.siblings[cpu] & cores for cpu in cores},
        nodes={node: found & cores for node, found in machine.nodes.items() if found & cores},
        quota=quota,
    )
    placement = plan_placement(own_threads, None, own)
    # What is not a compute thread may go anywhere.
    return placement._replace(allowed=machine.allowed)


def _own_cpus(cpus: str, place: RankPlace) -> str:
    cores, ranks = parse_cpus(cpus), place.local_size
    if len(cores) < ranks:
        raise ThreadPlacementError(f"--cpus {cpus}: {len(cores)} cores are too few for {ranks} ranks")
    each = len(cores) // ranks
    return ",".join(map(str, cores[place.local * each : (place.local + 1) * each]))


def _own_cores(machine: Machine, place: RankPlace) -> frozenset[int] | None:
    """Return the cores of this rank: a NUMA node, if there are as many as ranks, or else as many cores as the others.

    Return None if there are fewer cores than ranks.
    """
    choice, ranks = compute_cores(machine), place.local_size
    if len(choice.nodes) >= ranks:
        return frozenset(list(choice.nodes.values())[place.local])
    cores = [cpu for node in choice.nodes.values() for cpu in node]
    each = len(cores) // ranks
    return frozenset(cores[place.local * each : (place.local + 1) * each]) if each else None
