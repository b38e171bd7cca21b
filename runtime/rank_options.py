"""Options of an instance with layers that are divided among several processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .cluster_secret import addresses
from .disaggregation_options import DisaggregationOptions
from .options import opt, section


@section("Tensor parallelism", order=100)
@dataclass(frozen=True, kw_only=True)
class RankOptions(DisaggregationOptions):
    """Options of ranks."""

    tp_size: int = opt(
        default=1,
        help=(
            "Tensor-parallel ranks: processes with a part of every layer each. --threads and --cpus are divided "
            "among the ranks of a host. Ranks take one NUMA node each if the host has enough. On GPUs (not tried "
            "yet), each rank has a GPU, and the instance exchanges no KV."
        ),
        at_least=1,
    )
    nnodes: int = opt(
        default=1,
        help=(
            "Hosts of the ranks, with equally many ranks each. Run this command on every host with its own "
            "--node-rank; the first host serves requests."
        ),
        at_least=1,
    )
    node_rank: int = opt(default=0, help="Number of this host, from 0.")
    dist_init_addr: str | None = opt(
        default=None,
        help=(
            "HOST:PORT on the first host at which ranks of other hosts connect. This traffic is neither "
            "authenticated nor encrypted, and uses further ports: use a network of its own."
        ),
    )
    pp_size: int = opt(default=1, help="Accepted for compatibility with SGLang; must be 1.")

    @property
    def ranks_per_host(self) -> int:
        """Number of ranks on each host."""
        return max(self.tp_size // max(self.nnodes, 1), 1)

    def problems(self) -> Iterator[str]:
        """Yield a complaint for each wrong option."""
        size, nodes, node, address = self.tp_size, self.nnodes, self.node_rank, self.dist_init_addr
        if self.pp_size != 1:
            yield (
                f"--pp-size {self.pp_size}: there is no pipeline parallelism here: prefill and decode "
                "instances already work on different requests at once, and --tp-size divides a model that is too large "
                "for one host"
            )
        if size < 1 or nodes < 1:
            return
        if size % nodes:
            yield f"--tp-size {size} does not divide among --nnodes {nodes}: every host has as many ranks"
        if not 0 <= node < nodes:
            yield f"--node-rank is {node}: it must be 0 to {nodes - 1}, as --nnodes is {nodes}"
        if nodes > 1 and address is None:
            yield (
                "--nnodes above 1 needs --dist-init-addr HOST:PORT, an address of the first host that the others reach"
            )
        try:
            if len(addresses("--dist-init-addr", address)) > 1:
                yield f"--dist-init-addr is {address}: it is one HOST:PORT"
        except ValueError as e:
            yield str(e)
        if nodes > 1 and self.hands_over:
            yield (
                "--nnodes above 1 leaves each host a part of the KV, and a hand-over takes it from one place: give an "
                "instance that exchanges KV all of its ranks on one host (--nnodes 1)"
            )
