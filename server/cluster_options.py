"""The options of a whole cluster on one host: its shape, and, inherited, those of its instances and of its router."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ..router.options import RouterOptions, RouterOptionsError, RouterTargets, RoutingOptions
from ..runtime.disaggregation_options import DisaggregationMode
from ..runtime.options import HIDDEN, opt, section
from ..runtime.transfer_backends import TransferBackendName
from ..runtime.web.keys import KeyFileError, check_keys
from .options import ServerOptions


class ClusterOptionsError(ValueError):
    """An option that can't work; the message says what to write instead."""


@section("Cluster", order=1)
@dataclass(frozen=True, kw_only=True)
class ShapeOptions:
    """How many instances a cluster has, and what becomes of their processes."""

    prefill: int = opt(default=1, help="Number of prefill instances.")
    decode: int = opt(default=1, help="Number of decode instances.")
    unified: int = opt(default=0, help="Number of unified instances, which serve whole requests.")
    max_restarts: int = opt(
        default=10,
        help="Maximum restarts of a dead process within a minute; one more death ends the cluster.",
    )
    log_dir: str | None = opt(
        default=None,
        help=(
            "Folder for one log file per process. Default: all to stderr, each line after its process's name. A "
            "folder of another user is refused, and so are links in it."
        ),
    )


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(ShapeOptions, RoutingOptions, ServerOptions):
    """Options of ``pdserve up``: those of ``pdserve server`` for every instance, of the router, and the cluster's own.

    What the cluster decides for each instance (its mode, its ports) and for the router (its targets) can't be given.
    """

    host: str = opt(
        default="127.0.0.1",
        help="Address that the router listens on. Instances always listen on 127.0.0.1.",
        not_empty=True,
    )
    port: int = opt(default=8000, help="Port of the router's HTTP API; 0 takes a free one.")
    send_timeout: float = opt(
        default=60.0,
        help=(
            "Seconds without progress after which a connection to a client that does not read is closed, and its "
            "request ended. The router's limit for reading from instances is twice as long."
        ),
        above=0,
    )
    disaggregation_transfer_backend: TransferBackendName = opt(
        default="shm",
        help=(
            "How KV pages move: shm (same host, one copy), tcp (any host), nixl and mooncake (by these libraries, "
            "any host), cuda_ipc (within one GPU; not tried on one yet), fake (moves nothing, for tests)."
        ),
    )
    mem_fraction_static: float | None = opt(
        default=None,
        help=(
            "Share of device memory for weights and KV pools of all instances together, divided evenly. Default: "
            "0.88 on cuda. On cpu: 0.3 for the KV pools alone, which take at most nine tenths of what is free "
            "beside the weights."
        ),
    )
    threads: int | None = opt(
        default=None,
        help=(
            "Compute threads of each model worker. Default: one for each core that it is given, within the CPU quota."
        ),
        at_least=1,
    )
    cpus: str | None = opt(
        default=None,
        help=(
            'Cores that the model workers divide among themselves, such as "0,2-3". Default: the physical cores '
            "that this process may use, without efficiency cores. Under a smaller CPU quota, threads are not bound."
        ),
    )
    startup_timeout: float = opt(default=300.0, help="Seconds that the start of the whole cluster may take.", above=0)
    drain_timeout: float = opt(
        default=10.0,
        help="Seconds for running requests to finish after Ctrl-C or SIGTERM. A second Ctrl-C stops at once.",
        at_least=0,
    )
    mem_instances: int = opt(default=1, help=HIDDEN)
    disaggregation_mode: DisaggregationMode = opt(default="unified", help=HIDDEN)
    disaggregation_bootstrap_port: int | None = opt(default=None, help=HIDDEN)
    disaggregation_control_port: int = opt(default=0, help=HIDDEN)
    disaggregation_data_port: int = opt(default=0, help=HIDDEN)
    advertise_host: str | None = opt(default=None, help=HIDDEN)
    nnodes: int = opt(default=1, help=HIDDEN)
    node_rank: int = opt(default=0, help=HIDDEN)
    dist_init_addr: str | None = opt(default=None, help=HIDDEN)

    def check(self) -> None:
        """Raise ``ClusterOptionsError`` if the options contradict each other, or if its API keys can't be used."""
        if min(self.prefill, self.decode, self.unified) < 0:
            raise ClusterOptionsError("--prefill, --decode and --unified count instances: 0 or more")
        if bool(self.prefill) != bool(self.decode):
            given, missing = ("prefill", "decode") if self.prefill else ("decode", "prefill")
            raise ClusterOptionsError(
                f"--{given} {getattr(self, given)} is of no use with --{missing} 0: "
                f"start at least one of each, or set both to 0 and --unified to 1"
            )
        if self.prefill and self.handover == "off":
            raise ClusterOptionsError("--handover off leaves --prefill and --decode instances with nothing to do")
        if not self.prefill + self.unified:
            raise ClusterOptionsError("nothing to start: give --prefill and --decode, or --unified")
        if self.max_restarts < 0:
            raise ClusterOptionsError("--max-restarts must be 0 or more")
        try:
            self.check_routing()
            check_keys(self)
        except (RouterOptionsError, KeyFileError) as exc:
            raise ClusterOptionsError(str(exc)) from None

    def instance_options(self, **changes: Any) -> ServerOptions:
        """Return the options of one instance: the cluster's own values, except for the fields that ``changes`` sets."""
        common = {item.name: getattr(self, item.name) for item in fields(ServerOptions)}
        return ServerOptions(**{**common, **changes})

    def router_options(self, **changes: Any) -> RouterOptions:
        """Return the router's options: the cluster's own values, except for the fields that ``changes`` sets.

        ``changes`` must name the instances that the router sends requests to. A cluster has no options of
        ``RouterTargets``.
        """
        targets = {item.name for item in fields(RouterTargets)}
        names = {item.name for item in fields(RouterOptions)} - targets - changes.keys()
        common = {name: getattr(self, name) for name in names}
        return RouterOptions(**common, **changes)
