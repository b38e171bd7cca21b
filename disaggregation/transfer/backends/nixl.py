"""KV pages by NIXL, over UCX.

The protocol is that of ``leased_backend``. In addition:

- Each link has one agent on either side, with a name of its own. Only the end of an agent ends a writer's access.
  Removing a peer from an agent, to add it again, races.
- Memory is registered before an agent's metadata is asked for. Pages are prepared once a link, as descriptor lists.
- One thread does everything. It polls after each write and lets each endpoint take what has come. Without polling, an
  agent would keep a thread busy that takes a twelfth of a core, even if there is nothing to do.

A pool on a device (``--kv-staging-size 0``) is registered as "VRAM" by its address there. Either end may have its pool
on a device or on the host.

UCX uses TCP alone by default. If a writer may copy into the memory of another process on the same host, the end of an
agent can't take that memory away. Setting ``UCX_TLS`` (for RDMA, say) selects other transports.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import socket
import struct
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from ....mem_cache.kv_pages.page_group import PageGroup, Spans
from ...errors import LinkLost
from ..page_write import PageWrite
from .base import Capabilities, Completion
from .handshake import Offer
from .leased_backend import CONTACT_BYTES, Endpoint, EndpointInfo, Initiator, LeasedBackend, MemoryRange

TRANSPORTS = "tcp"
PLUGIN = "UCX"
DEVICE_TRANSPORTS = "tcp,cuda_copy"
"""Where a pool is on a device: UCX knows such memory by this, and copies it to and from what it sends."""
DONE, UNDER_WAY = "DONE", "PROC"
Int64s = npt.NDArray[np.int64]
SIOCGIFADDR = 0x8915
"""linux/sockios.h: the IPv4 address of an interface."""


def _load() -> tuple[Any, tuple[type[Exception], ...]]:
    """Load the NIXL library, and return it with the types of its exceptions. Raises ``ImportError``.

    UCX is limited to TCP unless the environment says otherwise.
    """
    os.environ.setdefault("UCX_TLS", TRANSPORTS)
    library, bindings = import_module("nixl_cu12._api"), import_module("nixl_cu12._bindings")
    logging.getLogger("nixl").setLevel(logging.ERROR)
    errors = tuple(getattr(bindings, name) for name in dir(bindings) if name.endswith("Error"))
    return library, errors


_LIBRARY, _ERRORS = _load()


class NixlBackend(LeasedBackend):
    """Transfer backend that writes KV pages with NIXL over UCX. Pools may be in host or device memory.

    Data moves only during calls of ``progress``.
    """

    name = "nixl"
    can = Capabilities(completion=Completion.DRIVEN)
    polls_endpoints = True
    reaches_devices = True

    def _listen(self) -> tuple[socket.socket, Offer]:
        sock, offer = super()._listen()
        device = interface_of(self.place)
        if device:
            # Read as the first agent is made. Without it, agents listen on every interface.
            os.environ.setdefault("UCX_NET_DEVICES", device)
        if any(memory.device is not None for memory in self.sources) and os.environ["UCX_TLS"] == TRANSPORTS:
            os.environ["UCX_TLS"] = DEVICE_TRANSPORTS
        # The first agent of a process takes half a second, others a thirtieth of that: no request shall wait for it.
        try:
            _make_agent(self.epoch, self.sources)
        except LinkLost:
            sock.close()
            raise
        return sock, offer

    def endpoint(self) -> Endpoint:
        return _NixlDoor(self.epoch, self.targets)

    def _initiator(self, offer: Offer, means: EndpointInfo) -> Initiator:
        return _NixlInitiator(self.epoch, self.groups, self.sources, means, offer)


def _make_agent(epoch: str, memory: Sequence[MemoryRange]) -> Any:
    try:
        name = f"{epoch}/{secrets.token_hex(8)}"
        agent = _LIBRARY.nixl_agent(name, _LIBRARY.nixl_agent_config(backends=[], enable_prog_thread=False))
        agent.create_backend(PLUGIN, {})
        for address, nbytes, device in memory:
            agent.register_memory([(address, nbytes, device or 0, "")], kind_of(device))
    except _ERRORS as e:
        raise LinkLost(f"NIXL can't start an agent: {e}") from e
    return agent


def kind_of(device: int | None) -> str:
    """Return NIXL's name for the memory of ``device``; None stands for the host."""
    return "DRAM" if device is None else "VRAM"


class _NixlDoor(Endpoint):
    def __init__(self, epoch: str, targets: Sequence[MemoryRange]) -> None:
        self._agent = _make_agent(epoch, targets)
        self.end: bytes = self._agent.get_agent_metadata()

    def look(self) -> None:
        try:
            self._agent.get_new_notifs()
        except _ERRORS as e:
            raise LinkLost(f"NIXL can't take what the peer writes: {e}") from e

    def close(self) -> None:
        # The last reference: its destructor closes the endpoints that the peer writes by.
        self._agent = None


class _NixlInitiator(Initiator):
    def __init__(
        self, epoch: str, groups: Sequence[PageGroup], sources: Sequence[MemoryRange], means: EndpointInfo, offer: Offer
    ) -> None:
        self._groups = groups
        self._addresses = means.addresses
        self._here, self._there = sources[0].device, means.device
        self._agent = _make_agent(epoch, sources)
        self._lists: list[tuple[Any, Any]] = []
        try:
            self._peer = self._agent.add_remote_agent(means.end)
            if not means.slab_bytes:
                self._lists = [
                    (
                        self._prepare("NIXL_INIT_AGENT", mine.address, ours.num_sources, ours.page_bytes, self._here),
                        self._prepare(self._peer, address, theirs.num_pages, theirs.page_bytes, self._there),
                    )
                    for ours, mine, theirs, address in zip(groups, sources, offer.groups, means.addresses, strict=True)
                ]
            nbytes = np.array([CONTACT_BYTES])
            self._first = self._post(np.array([sources[0].address]), np.array([means.contact]), nbytes)
        except _ERRORS as e:
            raise LinkLost(f"NIXL can't reach the peer: {e}") from e
        self._reached = False

    def _prepare(self, agent: Any, address: int, num_pages: int, page_bytes: int, device: int | None) -> Any:
        """Return ``num_pages`` adjacent pages from ``address`` on as a prepared descriptor list of ``agent``."""
        pages = np.array([[address, page_bytes, device or 0, page_bytes, num_pages]], dtype=np.uint64)
        return self._agent.prep_xfer_dlist(agent, pages, kind_of(device))

    def is_ready(self) -> bool:
        self._reached = self._reached or self.has_landed(self._first)
        return self._reached

    def start(self, pages: PageWrite) -> Any:
        try:
            if pages.layers == self._groups[pages.group].whole():
                here, there = self._lists[pages.group]
                handle = self._agent.make_prepped_xfer("WRITE", here, pages.src, there, pages.dst)
                self._agent.transfer(handle)
                return handle
            return self._post(*self._parts(pages))
        except _ERRORS as e:
            raise LinkLost(f"NIXL did not take a write: {e}") from e

    def fill(self, group: int, spans: Spans, there: int) -> Any:
        here, lengths = self._groups[group].region.address, spans[:, 1]
        places = there + np.cumsum(lengths) - lengths
        try:
            return self._post(spans[:, 0] + here, places, lengths)
        except _ERRORS as e:
            raise LinkLost(f"NIXL did not take a write: {e}") from e

    def _parts(self, pages: PageWrite) -> tuple[Int64s, Int64s, Int64s]:
        """Return the addresses of the layers to write, here and at the peer, and their bytes: one entry a piece."""
        group = self._groups[pages.group]
        here, there = group.spans(pages.src, pages.layers), group.spans(pages.dst, pages.layers)
        return here[:, 0] + group.region.address, there[:, 0] + self._addresses[pages.group], here[:, 1]

    def _post(self, here: Int64s, there: Int64s, lengths: Int64s) -> Any:
        local = self._agent.get_xfer_descs(_pieces(here, lengths, self._here), kind_of(self._here))
        remote = self._agent.get_xfer_descs(_pieces(there, lengths, self._there), kind_of(self._there))
        handle = self._agent.initialize_xfer("WRITE", local, remote, self._peer)
        self._agent.transfer(handle)
        return handle

    def has_landed(self, write: Any) -> bool:
        try:
            state = self._agent.check_xfer_state(write)
            if state == UNDER_WAY:
                return False
            if state != DONE:
                raise LinkLost(f"a write failed (NIXL says {state})")
            self._agent.release_xfer_handle(write)
        except _ERRORS as e:
            raise LinkLost(f"a write failed: {e}") from e
        return True

    def close(self) -> None:
        # Whatever refers to an agent keeps it alive.
        self._first = None
        self._lists.clear()
        self._agent = None


def _pieces(addresses: Int64s, lengths: Int64s, device: int | None) -> npt.NDArray[np.uint64]:
    """Return NIXL's descriptors of memory as an array [N, 3]: address, bytes and device number (0 on the host)."""
    return np.stack((addresses, lengths, np.full_like(lengths, device or 0)), axis=1).astype(np.uint64)


def interface_of(address: str) -> str:
    """Return the name of the network interface with this IPv4 address, or "" if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(sock, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has none
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return ""
