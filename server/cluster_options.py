"""The options of a whole cluster on one host: its shape, and, inherited, those of its instances and of its router."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal  # noqa: F401  (annotations of inherited options are evaluated here)

from cyclopts import Parameter

from ..router.options import RouterOptions, RouterOptionsError, RoutingOptions
from ..runtime.options import DisaggregationMode, ServerOptions
from ..runtime.transfer_backends import TransferBackendName
from ..runtime.web.keys import KeyFileError, check_keys


class ClusterOptionsError(ValueError):
    """An option that can't work; the message says what to write instead."""


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(RoutingOptions, ServerOptions):
    """Options of ``pdserve up``: those of ``pdserve server`` for every instance, of the router, and the cluster's own.

    What the cluster decides for each instance (its mode, its ports) and for the router (its targets) can't be given.

    Parameters
    ----------
    prefill
        How many prefill instances to start.
    decode
        How many decode instances to start.
    unified
        How many instances to start that serve whole requests.
    host
        Address that the router listens on; the instances always listen on 127.0.0.1.
    port
        Port of the router's HTTP API; 0 takes a free one.
    send_timeout
        Seconds in which a client has to take some of what it is sent; else its connection is closed and its request
        ended. The router has twice as long for what instances send it.
    log_dir
        Folder for one log file a process; default: all to stderr, each line after its process's name. A folder of
        another user is refused, and so are links in it.
    max_restarts
        How often in a minute a process that died is started again; one more death ends the cluster.
    disaggregation_transfer_backend
        How KV pages move: shm (same host, one copy), tcp (any host), nixl and mooncake (by these libraries,
        any host), cuda_ipc (within one GPU; not tried on one yet), fake (moves nothing, for tests).
    mem_fraction_static
        Share of the device's memory for weights and KV pools of all instances together, split evenly;
        default 0.88 on cuda, 0.3 on cpu.
    threads
        Compute threads of each model worker; default: one for each core that it is given, within the CPU quota.
    cpus
        Cores that the model workers divide among themselves, like "0,2-3"; default: the physical cores this process may
        use, efficiency cores left out. Under a CPU quota smaller than that they are bound to none.
    startup_timeout
        Seconds that the whole cluster may take to start.
    drain_timeout
        Seconds that running requests have to finish after Ctrl-C or SIGTERM; a second Ctrl-C doesn't wait.
    """

    prefill: int = 1
    decode: int = 1
    unified: int = 0
    port: int = 8000
    send_timeout: float = 60.0
    log_dir: str | None = None
    max_restarts: int = 10
    disaggregation_transfer_backend: TransferBackendName = "shm"
    drain_timeout: float = 10.0
    disaggregation_mode: Annotated[DisaggregationMode, Parameter(parse=False)] = "unified"
    disaggregation_bootstrap_port: Annotated[int | None, Parameter(parse=False)] = None
    disaggregation_control_port: Annotated[int, Parameter(parse=False)] = 0
    disaggregation_data_port: Annotated[int, Parameter(parse=False)] = 0
    advertise_host: Annotated[str | None, Parameter(parse=False)] = None
    nnodes: Annotated[int, Parameter(parse=False)] = 1
    node_rank: Annotated[int, Parameter(parse=False)] = 0
    dist_init_addr: Annotated[str | None, Parameter(parse=False)] = None

    def check(self) -> None:
        """Raise ``ClusterOptionsError`` when this cluster can't work."""
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
        """Return the options of one instance: these, with ``changes``."""
        common = {item.name: getattr(self, item.name) for item in fields(ServerOptions)}
        return ServerOptions(**{**common, **changes})

    def router_options(self, **changes: Any) -> RouterOptions:
        """Return the router's options: these, with ``changes``, which name its targets."""
        common = {item.name: getattr(self, item.name) for item in fields(RouterOptions) if item.name not in changes}
        return RouterOptions(**common, **changes)
