"""A backend that moves nothing and always succeeds: for tests and measurements of everything around the copy."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ....mem_cache.kv_pages.page_group import PageGroup
from ...errors import BadPages, NotConnected
from ..page_write import PageWrite
from .base import (
    Admitted,
    Capabilities,
    Completion,
    LinkDown,
    LinkEvent,
    LinkUp,
    TransferBackend,
    WriteHandle,
    WriteState,
)


class FakeBackend(TransferBackend):
    """Every peer is reachable, every write done at once, no incoming link exists."""

    can = Capabilities(moves_data=False, completion=Completion.AT_ONCE)

    def __init__(self, epoch: str, host: str, port: int = 0, advertise_host: str | None = None) -> None:
        self._peers: set[str] = set()
        self._events: list[LinkEvent] = []
        self._woken = threading.Event()

    def register(self, groups: Sequence[PageGroup]) -> bytes:
        return b"fake"

    def connect(self, peer: str, metadata: bytes) -> None:
        self._peers.add(peer)
        self._events.append(LinkUp(peer))

    def admit(self, peer: str) -> None:
        self._events.append(Admitted(peer))

    def write(self, pages: PageWrite) -> WriteHandle:
        if pages.handover.epoch not in self._peers:
            raise NotConnected(f"peer {pages.handover.epoch} is not connected")
        if len(pages.src) != len(pages.dst):
            raise BadPages("not as many pages here as there")
        return WriteHandle(WriteState.DONE)

    def poll(self, handle: WriteHandle) -> WriteState:
        return handle.state

    def disconnect(self, peer: str) -> None:
        self._peers.discard(peer)
        self._events.append(LinkDown(peer, "disconnected"))

    def progress(self, timeout: float | None) -> list[LinkEvent]:
        if not self._events:
            self._woken.wait(timeout)
        self._woken.clear()
        events, self._events = self._events, []
        return events

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        self._peers.clear()
