"""Transfers as instances make them: a transfer engine on either side, told what to do by a scheduler's messages."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from typing import NamedTuple

from ...disaggregation.transfer.backends.base import TransferBackend
from ...disaggregation.transfer.backends.load import make_backend
from ...disaggregation.transfer.engine import TransferEngine
from ...mem_cache.kv_pages.page_group import PageGroup
from ...mem_cache.kv_pages.region import KVRegion
from ...messages.base import I32, HandoverId, pack_i32
from ...messages.worker import (
    AdmitPeer,
    ConnectPeer,
    GrantPages,
    PagesVerified,
    PeerAdmitted,
    PeerConnected,
    RevokePages,
    SendEnded,
    SendPages,
    SendProgress,
    SliceChecksum,
    TransferCommand,
    TransferEvent,
    VerifyPages,
)
from .sides import HOST, LIMIT_SECONDS, Moving, Owner, Pools, SideFailed, Writer

WRITER, OWNER = "bench-writer", "bench-owner"
LINK = 1
HANDOVER = HandoverId(OWNER, 1, 1)
"""One for all requests: they follow one another, and each is over before the next."""
FENCE = HandoverId(OWNER, 2, 1)


class _Answer(NamedTuple):
    event: TransferEvent
    seconds: float


class _Driven:
    """An engine, and the wait for what it answers."""

    def __init__(self, backend: TransferBackend, region: KVRegion, page_bytes: int, epoch: str) -> None:
        self._events: queue.SimpleQueue[tuple[float, TransferEvent]] = queue.SimpleQueue()
        self._engine = TransferEngine(backend, [PageGroup(region, page_bytes)], epoch, HOST, self._emit).start()
        self.metadata = self._engine.metadata

    def _emit(self, event: TransferEvent) -> None:
        # Here, where an instance's engine sends it: what this process does to hear of it is no part of the transfer.
        if not isinstance(event, SendProgress):
            self._events.put((time.perf_counter(), event))

    def submit(self, command: TransferCommand) -> None:
        self._engine.submit(command)

    def ask(self, command: TransferCommand) -> _Answer:
        """Submit ``command`` and return its answer with the seconds that it took.

        Raises ``SideFailed`` after ``LIMIT_SECONDS``.
        """
        began = time.perf_counter()
        self._engine.submit(command)
        try:
            ended, event = self._events.get(timeout=LIMIT_SECONDS)
        except queue.Empty:
            raise SideFailed(f"no answer to {type(command).__name__} within {LIMIT_SECONDS:g} s") from None
        return _Answer(event, ended - began)


class EngineOwner(Owner):
    """The receiving side: a transfer engine with the destination pool, driven by messages."""

    def __init__(self, backend: str, pools: Pools) -> None:
        self._driven = _Driven(make_backend(backend, OWNER, HOST), pools.destination, pools.page_bytes, OWNER)
        self.means = self._driven.metadata
        answer = self._driven.ask(AdmitPeer(WRITER, LINK))
        if answer.event != PeerAdmitted(WRITER, LINK):
            raise SideFailed(f"the writer was not admitted: {answer.event}")

    def grant(self, pages: I32) -> None:
        # A side that has granted nothing does not poll its library. So it leaves the processor to the side that is
        # measured.
        self._driven.submit(RevokePages(HANDOVER))
        if len(pages):
            self._driven.submit(GrantPages(HANDOVER, WRITER, [pack_i32(pages)]))
        # A grant is not answered. What is asked behind it is, and commands are obeyed in order.
        self._driven.ask(VerifyPages(FENCE, [b""], []))

    def verify(self, pages: I32, slices: Sequence[SliceChecksum]) -> float:
        answer = self._driven.ask(VerifyPages(HANDOVER, [pack_i32(pages)], list(slices)))
        if answer.event != PagesVerified(HANDOVER, ok=True):
            raise SideFailed(f"what landed is not what was sent: {answer.event}")
        return answer.seconds


class EngineWriter(Writer):
    """The sending side: a transfer engine with the source pool, driven by messages."""

    def __init__(self, backend: str, pools: Pools) -> None:
        self._driven = _Driven(make_backend(backend, WRITER, HOST), pools.source, pools.page_bytes, WRITER)

    def connect(self, means: bytes) -> None:
        answer = self._driven.ask(ConnectPeer(OWNER, LINK, means))
        if answer.event != PeerConnected(OWNER, LINK):
            raise SideFailed(f"the owner was not reached: {answer.event}")

    def move(self, src: I32, dst: I32, *, hashed: bool) -> Moving:
        answer = self._driven.ask(SendPages(HANDOVER, [pack_i32(src)], [pack_i32(dst)], last=True, checksum=hashed))
        if not isinstance(answer.event, SendEnded) or answer.event.error is not None:
            raise SideFailed(f"the hand-over failed: {answer.event}")
        return Moving(answer.seconds, answer.event.slices)
