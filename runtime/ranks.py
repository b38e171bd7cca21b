"""Tensor-parallel ranks: their numbers, their hosts, and the names of their processes.

Ranks are numbered over all hosts, equally many on each. The first rank of a host is its lead. It owns the memory that
the host's ranks share, and passes the steps on to them. Rank 0 leads the first host, and answers the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass

from .rank_options import RankOptions

WORKER = "worker"


@dataclass(frozen=True)
class RankPlace:
    """Rank ``rank`` of ``size``, on ``nodes`` hosts."""

    rank: int = 0
    size: int = 1
    nodes: int = 1

    @property
    def local_size(self) -> int:
        """Number of ranks on each host."""
        return self.size // self.nodes

    @property
    def node(self) -> int:
        """Number of the rank's host, from 0."""
        return self.rank // self.local_size

    @property
    def local(self) -> int:
        """Number of the rank among those on its host, from 0."""
        return self.rank % self.local_size

    @property
    def first(self) -> int:
        """Number of the first rank on this rank's host, which leads the others."""
        return self.node * self.local_size

    @property
    def followers(self) -> range:
        """Numbers of the ranks on this rank's host but the first."""
        return range(self.first + 1, self.first + self.local_size)


def places(options: RankOptions) -> dict[str, RankPlace]:
    """Return the ranks that an instance has on this host, by the names of their processes.

    They are in the order of their numbers. So the host's lead comes first, and every host has one.
    """
    lead = RankPlace(options.node_rank * (options.tp_size // options.nnodes), options.tp_size, options.nnodes)
    ranks = range(lead.first, lead.first + lead.local_size)
    return {worker_name(rank): RankPlace(rank, options.tp_size, options.nnodes) for rank in ranks}


def worker_name(rank: int) -> str:
    """Return the name of the process of ``rank``."""
    return f"{WORKER}-{rank}" if rank else WORKER


def is_worker(name: str) -> bool:
    """Return whether a process of this name is a model worker."""
    return name.split("-")[0] == WORKER
