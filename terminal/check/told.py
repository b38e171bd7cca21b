"""What ``/server_info`` tells, as far as it is judged here. Fields that are missing have a neutral value."""

from __future__ import annotations

from typing import Literal

import msgspec


class Machine(msgspec.Struct, frozen=True):
    """``kernel_level``: of the CPU kernels, None where torch computes."""

    kernel_level: str | None = None
    reason: str = ""


class Pool(msgspec.Struct, frozen=True):
    """Tokens."""

    total: int = 0
    free: int = 0
    cached: int = 0


class Queues(msgspec.Struct, frozen=True):
    """Requests."""

    waiting: int = 0
    running: int = 0


class Peer(msgspec.Struct, frozen=True):
    """An instance that KV is exchanged with; ``bootstrap`` (HOST:PORT) where this one found it."""

    state: str = ""
    epoch: str = ""
    bootstrap: str = ""


class Direction(msgspec.Struct, frozen=True):
    """Hand-overs since the start."""

    done: int = 0
    failed: int = 0


class Disaggregation(msgspec.Struct, frozen=True):
    """Hand-overs to others and from them."""

    sent: Direction = Direction()
    received: Direction = Direction()
    peers: list[Peer] = []


class Layout(msgspec.Struct, frozen=True):
    """What two instances must have in common to exchange pages."""

    page_size: int = 0
    num_layers: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    dtype: str = ""


class InstanceInfo(msgspec.Struct, frozen=True):
    """An instance's report about itself; ``role`` is "" if another program answers."""

    role: str = ""
    status: str = ""
    version: str = ""
    model: str = ""
    fingerprint: str = ""
    device: str = ""
    machine: Machine = Machine()
    pool: Pool = Pool()
    queues: Queues = Queues()
    invariants: str | None = None
    retractions: int = 0
    kv_layout: Layout = Layout()
    disaggregation: Disaggregation | None = None


class RoutedInstance(msgspec.Struct, frozen=True):
    """An instance as a router sees it; ``info`` is None where the instance did not answer."""

    url: str
    role: str
    state: str
    reason: str = ""
    failures: int = 0
    info: InstanceInfo | None = None


class RouterSelf(msgspec.Struct, frozen=True):
    """The router's own part."""

    can_serve: bool = False


class ServerTold(msgspec.Struct, frozen=True):
    """What the rest of the answer is follows from ``role``."""

    role: Literal["router", "unified", "prefill", "decode"]
    router: RouterSelf | None = None
    instances: list[RoutedInstance] = []
