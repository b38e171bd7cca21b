"""NIXL alone: an agent on either side, and one request for all pages of prepared lists.

Transports and network device are those of the backend. The owner also polls as the backend does: without a thread of
the library's, every half millisecond. The writer polls without a pause, since polling is what moves the bytes.
"""

from __future__ import annotations

import logging
import os
import time
from importlib import import_module
from typing import Any

import msgspec
import numpy as np

from ...disaggregation.transfer.backends.leased_backend import POLL_SECONDS
from ...disaggregation.transfer.backends.load import find_backend
from ...mem_cache.kv_pages.region import KVRegion
from ...messages.base import I32
from .sides import HOST, LIMIT_SECONDS, Moving, Owner, Pools, SideFailed, Writer

MEMORY = "DRAM"


class _Means(msgspec.Struct):
    agent: bytes
    address: int


def _make_agent(name: str, region: KVRegion) -> Any:
    """Start an agent with ``region`` registered. Raises ``BackendUnavailable``."""
    find_backend("nixl")  # sets the library up, as it does for the backend
    from ...disaggregation.transfer.backends.nixl import interface_of

    os.environ.setdefault("UCX_NET_DEVICES", interface_of(HOST))
    library = import_module("nixl_cu12._api")
    logging.getLogger("nixl").setLevel(logging.ERROR)
    agent = library.nixl_agent(name, library.nixl_agent_config(backends=[], enable_prog_thread=False))
    agent.create_backend("UCX", {})
    agent.register_memory([(region.address, region.nbytes, 0, "")], MEMORY)
    return agent


def _pages_at(address: int, pools: Pools) -> Any:
    """Describe all pages of a pool as one row [1, 5]: address, bytes, device, stride, count."""
    return np.array([[address, pools.page_bytes, 0, pools.page_bytes, pools.num_pages]], dtype=np.uint64)


class NixlOwner(Owner):
    """The receiving side: a NIXL agent with the destination pool."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools  # else they would be unmapped
        self._agent = _make_agent("bench-owner", pools.destination)
        address = pools.destination.address
        self.means = msgspec.msgpack.encode(_Means(self._agent.get_agent_metadata(), address))

    def grant(self, pages: I32) -> None:
        self.look_seconds = POLL_SECONDS if len(pages) else None

    def look(self) -> None:
        self._agent.get_new_notifs()


class NixlWriter(Writer):
    """The sending side: a NIXL agent that writes all pages with one request."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._agent = _make_agent("bench-writer", pools.source)

    def connect(self, means: bytes) -> None:
        known = msgspec.msgpack.decode(means, type=_Means)
        peer = self._agent.add_remote_agent(known.agent)
        here = _pages_at(self._pools.source.address, self._pools)
        self._here = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", here, MEMORY)
        self._there = self._agent.prep_xfer_dlist(peer, _pages_at(known.address, self._pools), MEMORY)

    def move(self, src: I32, dst: I32, *, hashed: bool) -> Moving:
        began = time.perf_counter()
        handle = self._agent.make_prepped_xfer("WRITE", self._here, src, self._there, dst)
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
            if time.perf_counter() > began + LIMIT_SECONDS:
                raise SideFailed(f"a write was not over within {LIMIT_SECONDS:g} s")
        seconds = time.perf_counter() - began
        if state != "DONE":
            raise SideFailed(f"a write failed (NIXL says {state})")
        self._agent.release_xfer_handle(handle)
        return Moving(seconds)
