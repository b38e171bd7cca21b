"""KV pages by Mooncake's transfer engine, over TCP.

The protocol is that of ``leased_backend``. In addition:

- Each link has one engine on either side. Only the end of an engine ends a writer's access, cancels a write, or forgets
  a peer. A frozen newcomer also holds up the engine that greets it.
- Every run of pages is submitted by itself: of a batch, a failure is reported while the rest goes on.
- The first contact has a thread of its own, as it may take as long as the peer likes.

Ending an engine holds up all Python threads of the process until its listener's ``accept`` returns: a second, unless
that has a limit.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from ....mem_cache.kv_pages.page_group import PageGroup, Spans
from ....mem_cache.kv_pages.region import RegionError
from ...errors import LinkLost
from ..page_write import PageWrite, paired_spans
from .handshake import Offer
from .leased_backend import CONTACT_BYTES, Endpoint, EndpointInfo, Initiator, LeasedBackend, MemoryRange

ACCEPT_SECONDS = 0.02
FIRST_SECONDS = 0.001
"""How often the first contact is asked whether it is made."""
UNDER_WAY, LANDED = 0, 1
SETTINGS = {
    "MC_FORCE_TCP": "1",
    # Without it, each page has a connection of its own.
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_LOG_LEVEL": "ERROR",
}
HARMFUL = ("MC_LOG_DIR", "MC_TCP_PROTO")
"""The first ends the process as the library is loaded, the second says of bytes that have not landed that they have."""


def _load() -> Any:
    """Set the library's environment variables, which it reads as it is loaded, and load it. Raises ``ImportError``."""
    for name in HARMFUL:
        os.environ.pop(name, None)
    os.environ.update(SETTINGS)
    return import_module("mooncake.engine")


_LIBRARY = _load()


class MooncakeBackend(LeasedBackend):
    """Transfer backend that writes KV pages with Mooncake's transfer engine over TCP, between IPv4 hosts.

    Each link has an engine of its own on either side.
    """

    name = "mooncake"

    def _listen(self) -> tuple[socket.socket, Offer]:
        sock, offer = super()._listen()
        if ipaddress.ip_address(self.place).version != 4:
            sock.close()
            raise RegionError(f"mooncake reaches IPv4 addresses only, not {self.place}: give another --host")
        return sock, offer

    def endpoint(self) -> Endpoint:
        return _MooncakeDoor(self.place, self.targets)

    def _initiator(self, offer: Offer, means: EndpointInfo) -> Initiator:
        return _MooncakeInitiator(self.place, self.groups, self.sources, means, self.wake)


def _make_engine(place: str, memory: Sequence[MemoryRange]) -> Any:
    engine = _LIBRARY.TransferEngine()
    code = engine.initialize(place, "P2PHANDSHAKE", "tcp", "")
    for address, nbytes, _ in memory:
        code = code or engine.register_memory(address, nbytes)
    if code:
        raise LinkLost(f"mooncake's transfer engine can't start on {place} (code {code}); its own messages are above")
    _limit_accept(engine.get_rpc_port())
    return engine


def _limit_accept(port: int) -> None:
    """Set a short time limit on ``accept`` of the library's listener on ``port``, so that it can be ended."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.family == socket.AF_INET and sock.getsockname()[1] == port:
                    limit = struct.pack("ll", 0, int(ACCEPT_SECONDS * 1e6))
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


class _MooncakeDoor(Endpoint):
    def __init__(self, place: str, targets: Sequence[MemoryRange]) -> None:
        self._engine = _make_engine(place, targets)
        self.end = f"{place}:{self._engine.get_rpc_port()}".encode()

    def close(self) -> None:
        # This is the last reference. The engine's destructor waits until the writes under way have ended.
        self._engine = None


class _MooncakeInitiator(Initiator):
    def __init__(
        self,
        place: str,
        groups: Sequence[PageGroup],
        sources: Sequence[MemoryRange],
        means: EndpointInfo,
        wake: Callable[[], None],
    ) -> None:
        self._groups = groups
        self._addresses = means.addresses
        self._session = means.end.decode(errors="replace")
        self._engine = _make_engine(place, sources)
        self._contact = _Contact()
        # The thread has the engine while it waits, whatever becomes of the link.
        args = (self._engine, self._session, sources[0].address, means.contact, self._contact, wake)
        threading.Thread(target=_make_contact, args=args, name="mooncake-contact", daemon=True).start()

    def is_ready(self) -> bool:
        if self._contact.error:
            raise LinkLost(self._contact.error)
        return self._contact.made

    def start(self, pages: PageWrite) -> list[int]:
        here, there = self._groups[pages.group].region.address, self._addresses[pages.group]
        local, remote = paired_spans(pages, self._groups[pages.group])
        return [
            self._submit(here + source, there + target, length)
            for (source, length), (target, _) in zip(local.tolist(), remote.tolist(), strict=True)
        ]

    def fill(self, group: int, spans: Spans, there: int) -> list[int]:
        here, tickets = self._groups[group].region.address, []
        for source, length in spans.tolist():
            tickets.append(self._submit(here + source, there, length))
            there += length
        return tickets

    def _submit(self, here: int, there: int, length: int) -> int:
        number = int(self._engine.transfer_submit_write(self._session, here, there, length))
        if not number:
            raise LinkLost("mooncake did not take a write")
        return number

    def has_landed(self, write: list[int]) -> bool:
        # The library forgets a write after reporting its end.
        while write:
            code = self._engine.transfer_check_status(write[-1])
            if code == UNDER_WAY:
                return False
            if code != LANDED:
                raise LinkLost(f"a write failed (mooncake's code {code})")
            write.pop()
        return True

    def close(self) -> None:
        self._engine = None


class _Contact:
    """What a thread says of the first contact."""

    made = False
    error = ""


def _make_contact(
    engine: Any, session: str, here: int, there: int, contact: _Contact, wake: Callable[[], None]
) -> None:
    number = engine.transfer_submit_write(session, here, there, CONTACT_BYTES)
    code = UNDER_WAY if number else -1
    while code == UNDER_WAY:
        time.sleep(FIRST_SECONDS)
        code = engine.transfer_check_status(number)
    contact.made = code == LANDED
    contact.error = "" if contact.made else f"mooncake can't reach the peer at {session} (code {code})"
    with contextlib.suppress(OSError, ValueError):  # the backend may be closed by now
        wake()
