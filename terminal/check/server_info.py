"""The fields of ``/server_info`` that ``pdserve check`` judges. Missing fields have a neutral value."""

from __future__ import annotations

from typing import Literal

import msgspec


class KernelReport(msgspec.Struct, frozen=True):
    """The instance's CPU kernels. ``kernel_level`` is None if PyTorch computes."""

    kernel_level: str | None = None
    reason: str = ""


class PoolReport(msgspec.Struct, frozen=True):
    """Size and use of the KV pool, in tokens."""

    total: int = 0
    free: int = 0
    cached: int = 0


class QueueReport(msgspec.Struct, frozen=True):
    """Numbers of requests, by state."""

    waiting: int = 0
    running: int = 0


class PeerReport(msgspec.Struct, frozen=True):
    """An instance that KV is exchanged with, and the bootstrap address (HOST:PORT) that it was found at."""

    state: str = ""
    epoch: str = ""
    bootstrap: str = ""


class DirectionReport(msgspec.Struct, frozen=True):
    """Numbers of hand-overs in one direction since the start."""

    done: int = 0
    failed: int = 0


class HandoverReport(msgspec.Struct, frozen=True):
    """Hand-overs in both directions, and the peers."""

    sent: DirectionReport = DirectionReport()
    received: DirectionReport = DirectionReport()
    peers: list[PeerReport] = []


class LayoutReport(msgspec.Struct, frozen=True):
    """Layout of the KV pages, which two instances must share to exchange them."""

    page_size: int = 0
    num_layers: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    dtype: str = ""


class InstanceReport(msgspec.Struct, frozen=True):
    """An instance's report about itself; ``role`` is "" if another program answers."""

    role: str = ""
    status: str = ""
    version: str = ""
    model: str = ""
    fingerprint: str = ""
    device: str = ""
    machine: KernelReport = KernelReport()
    pool: PoolReport = PoolReport()
    queues: QueueReport = QueueReport()
    invariants: str | None = None
    retractions: int = 0
    kv_layout: LayoutReport = LayoutReport()
    disaggregation: HandoverReport | None = None


class RoutedInstance(msgspec.Struct, frozen=True):
    """An instance as a router sees it; ``info`` is None where the instance did not answer."""

    url: str
    role: str
    state: str
    reason: str = ""
    failures: int = 0
    info: InstanceReport | None = None


class RouterReport(msgspec.Struct, frozen=True):
    """The router's report about itself."""

    can_serve: bool = False


class ServerReport(msgspec.Struct, frozen=True):
    """Answer of ``/server_info``. ``role`` decides which fields it has."""

    role: Literal["router", "unified", "prefill", "decode"]
    router: RouterReport | None = None
    instances: list[RoutedInstance] = []
