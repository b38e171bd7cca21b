"""Mooncake's engine alone: every run of pages submitted by itself, all of them at once, and each asked after.

Its settings are those of the backend.
"""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

import msgspec

from ...disaggregation.transfer.backends.load import find_backend
from ...mem_cache.kv_pages.page_group import neighbour_spans
from ...mem_cache.kv_pages.region import KVRegion
from ...messages.base import I32
from .sides import HOST, LIMIT_SECONDS, Moving, Owner, Pools, SideFailed, Writer

ASK_SECONDS = 0.0001
"""Seconds between two questions whether a write is done.

Asking without a pause takes a core from the library's threads.
"""
UNDER_WAY, LANDED = 0, 1


class _Means(msgspec.Struct):
    session: str
    address: int


def _make_engine(region: KVRegion) -> Any:
    """Start a Mooncake transfer engine with the memory of ``region`` registered, and return it.

    Raises ``BackendUnavailable`` if the library is missing, and ``SideFailed`` if the engine can't start.
    """
    find_backend("mooncake")  # sets the library up, as it does for the backend
    engine = import_module("mooncake.engine").TransferEngine()
    code = engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") or engine.register_memory(region.address, region.nbytes)
    if code:
        raise SideFailed(f"mooncake's transfer engine can't start on {HOST} (code {code})")
    return engine


class MooncakeOwner(Owner):
    """The receiving side: a Mooncake transfer engine with the destination pool."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools  # else they would be unmapped
        self._engine = _make_engine(pools.destination)
        session = f"{HOST}:{self._engine.get_rpc_port()}"
        self.means = msgspec.msgpack.encode(_Means(session, pools.destination.address))


class MooncakeWriter(Writer):
    """The sending side: a Mooncake transfer engine that writes from the source pool."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._engine = _make_engine(pools.source)

    def connect(self, means: bytes) -> None:
        self._peer = msgspec.msgpack.decode(means, type=_Means)

    def move(self, src: I32, dst: I32, *, hashed: bool) -> Moving:
        began = time.perf_counter()
        local, remote = neighbour_spans(src, dst, self._pools.page_bytes)
        here = self._pools.source.address
        under_way = [
            self._submit(here + source, self._peer.address + target, length)
            for (source, length), target in zip(local.tolist(), remote[:, 0].tolist(), strict=True)
        ]
        while under_way:
            # The library forgets a write after reporting its end.
            code = self._engine.transfer_check_status(under_way[-1])
            if code == LANDED:
                under_way.pop()
            elif code != UNDER_WAY:
                raise SideFailed(f"a write failed (mooncake's code {code})")
            elif time.perf_counter() > began + LIMIT_SECONDS:
                raise SideFailed(f"{len(under_way)} writes were not over within {LIMIT_SECONDS:g} s")
            else:
                time.sleep(ASK_SECONDS)
        return Moving(time.perf_counter() - began)

    def _submit(self, here: int, there: int, length: int) -> int:
        number = int(self._engine.transfer_submit_write(self._peer.session, here, there, length))
        if not number:
            raise SideFailed("mooncake did not take a write")
        return number
