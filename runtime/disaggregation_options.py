"""Options of hand-overs: the role of an instance, its peers, its ports for them, and its time limits.

They lie below the rooms that read them: the scheduler, the model worker, the hand-over and the HTTP process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .cluster_secret import ClusterSecret, addresses
from .options import flag, opt, section
from .transfer_backends import TransferBackendName, describe_backends
from .web.options import AccessOptions
from .web.ports import is_loopback

DisaggregationMode = Literal["unified", "prefill", "decode"]
DEFAULT_BOOTSTRAP_PORT = 8998


@section("Prefill and decode", order=30)
@dataclass(frozen=True, kw_only=True)
class DisaggregationOptions(AccessOptions):
    """Options of hand-overs."""

    disaggregation_mode: DisaggregationMode = opt(
        default="unified",
        help=(
            "Role of this instance. unified: prefill and decode here. prefill: compute prompts and push their KV to "
            "a decode. decode: receive KV and generate."
        ),
    )
    handover: Literal["auto", "on", "off"] = opt(
        default="auto",
        help=(
            "Whether this instance exchanges KV with others. auto: in prefill and decode mode. A unified instance "
            'with "on" takes either leg of a request: the prefill leg if the request names its own bootstrap '
            "address."
        ),
    )
    insecure_cluster: bool = opt(
        default=False,
        help=(
            "Exchange KV on a non-loopback address without a cluster secret. Any host that reaches the ports can "
            "take part."
        ),
    )
    allow_bootstrap: str | None = opt(
        default=None,
        help=(
            "Comma-separated bootstrap servers (HOST:PORT) that any request may name, for routers without the "
            "secret. Without a secret, requests may always name loopback addresses."
        ),
    )
    drain_to: str | None = opt(
        default=None,
        help=(
            "Comma-separated bootstrap servers (HOST:PORT) of instances that take over running requests on SIGTERM. "
            "Default: requests finish here."
        ),
    )
    return_kv: bool = opt(
        default=False,
        help=(
            "Send the KV of generated tokens back to the prefill, so that the next turn of a conversation finds it "
            "in the prefix cache there. Costs one more transfer per request. Both instances need the same cluster "
            "secret."
        ),
    )
    disaggregation_bootstrap_port: int | None = opt(
        default=None,
        help=(
            "Port of this instance's bootstrap server. Default: 8998 for a prefill, a free one (0) for a unified "
            "instance. On a decode: the port that a request without bootstrap_port means."
        ),
    )
    disaggregation_control_port: int = opt(
        default=0,
        help="Port for control messages between instances that exchange KV; 0 takes a free one.",
    )
    disaggregation_data_port: int = opt(default=0, help="Port for KV with the tcp backend; 0 takes a free one.")
    advertise_host: str | None = opt(
        default=None,
        help=(
            "Name or address by which other instances reach this one, if it differs from --host (0.0.0.0, or behind "
            "NAT)."
        ),
        not_empty=True,
    )
    disaggregation_transfer_backend: TransferBackendName = opt(
        default="tcp",
        help=f"How KV pages move: {describe_backends()}.",
    )
    kv_staging_size: float | None = opt(
        default=None,
        help=(
            "Host memory for KV on its way from and to a GPU, in GB; half of it for each direction. Default 0.25. A "
            "prompt may be larger. 0: peers write to GPU memory directly (nixl; cuda_ipc always does; not tried on "
            "a GPU yet). On a CPU, pages move from pool to pool, and no staging is used unless this is above 0."
        ),
    )
    disaggregation_threshold: str = opt(
        default="auto",
        help=(
            "Instance that computes a prompt if the request names a prefill; decided by the decode. auto: the one "
            "with the lower estimated TTFT. N: the decode if fewer than N tokens are uncached there. always: the "
            "prefill. never: the decode. With auto on both, an idle prefill serves whole requests if its decode is "
            "much slower or close to its ITL budget."
        ),
    )
    disaggregation_ib_device: str | None = opt(
        default=None,
        help="Accepted for compatibility with SGLang; unused without an RDMA backend.",
    )
    disaggregation_bootstrap_timeout: float = opt(
        default=30.0,
        help="Seconds that each side of a hand-over waits for the other to appear.",
        above=0,
    )
    disaggregation_transfer_timeout: float = opt(
        default=120.0,
        help=(
            "Seconds without progress (no page arrives, no token is computed) after which a hand-over fails once "
            "its prompt is being computed."
        ),
        above=0,
    )
    disaggregation_queue_timeout: float = opt(
        default=300.0,
        help=(
            "Seconds that a hand-over may wait for memory on the decode, or in the queue of the prefill. Give both "
            "sides the same."
        ),
        above=0,
    )
    disaggregation_heartbeat_interval: float = opt(
        default=0.2,
        help="Seconds between heartbeats of two connected instances.",
        above=0,
    )
    disaggregation_heartbeat_timeout: float = opt(
        default=0.9,
        help="Seconds of silence after which a peer counts as dead. A killed peer is noticed at once.",
        above=0,
    )
    disable_handover_checksum: bool = opt(
        default=False,
        help="Do not verify received KV by checksums. Damaged pages then reach answers and the prefix cache.",
    )

    @property
    def default_bootstrap_port(self) -> int:
        """Bootstrap port that is meant by a request without one: the option's, or 8998."""
        return (
            DEFAULT_BOOTSTRAP_PORT if self.disaggregation_bootstrap_port is None else self.disaggregation_bootstrap_port
        )

    @property
    def own_bootstrap_port(self) -> int:
        """Port on which this instance's bootstrap server listens; 0: any free port, as always on a decode."""
        if self.disaggregation_mode == "prefill":
            return self.default_bootstrap_port
        return 0 if self.disaggregation_mode == "decode" else self.disaggregation_bootstrap_port or 0

    @property
    def hands_over(self) -> bool:
        """Whether this instance exchanges KV with others."""
        return self.handover == "on" or (self.handover == "auto" and self.disaggregation_mode != "unified")

    def problems(self) -> Iterator[str]:
        """Yield a complaint for each wrong option."""
        yield from self._port_problems()
        if self.handover == "off" and self.disaggregation_mode != "unified":
            yield f"--handover off leaves a {self.disaggregation_mode} instance with nothing to do: drop one of the two"
        if self.kv_staging_size is not None and not 0 <= self.kv_staging_size < math.inf:
            yield f"--kv-staging-size is {self.kv_staging_size:g}: it is a number of GB, 0 for none"
        threshold = self.disaggregation_threshold
        if threshold not in ("auto", "always", "never") and not (threshold.isascii() and threshold.isdigit()):
            yield f"--disaggregation-threshold is {threshold}: it must be auto, always, never or a number of tokens"
        if self.disaggregation_heartbeat_timeout <= self.disaggregation_heartbeat_interval:
            yield (
                f"--disaggregation-heartbeat-timeout {self.disaggregation_heartbeat_timeout} must be longer than "
                f"--disaggregation-heartbeat-interval {self.disaggregation_heartbeat_interval}, best three times "
                "as long"
            )
        yield from self._cluster_problems()

    def _port_problems(self) -> Iterator[str]:
        # A decode's own is always a free one: there, the option says what a request means.
        least = 1 if self.disaggregation_mode == "decode" else 0
        if not least <= self.default_bootstrap_port <= 65535:
            free = "" if least else " (0 takes a free one)"
            yield f"--disaggregation-bootstrap-port is {self.default_bootstrap_port}: it must be 1 to 65535{free}"
        for name in ("disaggregation_control_port", "disaggregation_data_port"):
            if not 0 <= getattr(self, name) <= 65535:
                yield f"{flag(name)} is {getattr(self, name)}: it must be 1 to 65535 (0 takes a free one)"
        if not self.hands_over:
            return
        ports = {"--port": self.port, "--disaggregation-control-port": self.disaggregation_control_port}
        ports["--disaggregation-data-port"] = self.disaggregation_data_port
        ports["--disaggregation-bootstrap-port"] = self.own_bootstrap_port
        for port in sorted({p for p in ports.values() if p}):
            if len(flags := [flag for flag, given in ports.items() if given == port]) > 1:
                yield f"{' and '.join(flags)} are both {port}: an instance listens on each, so give them different ones"

    def _cluster_problems(self) -> Iterator[str]:
        try:
            secret = ClusterSecret.read(self.cluster_secret_file)
            addresses("--allow-bootstrap", self.allow_bootstrap)
            addresses("--drain-to", self.drain_to)
        except ValueError as e:
            yield str(e)
            return
        if self.return_kv and secret is None:
            yield (
                "--return-kv needs --cluster-secret-file: others share what is given back, so it must be known by whom"
            )
        if self.hands_over and secret is None and not self.insecure_cluster and not is_loopback(self.host):
            yield (
                f"--host {self.host} lets others reach the ports by which instances exchange KV: give this one and its "
                "peers the same --cluster-secret-file, or, on a network of their own, --insecure-cluster"
            )
