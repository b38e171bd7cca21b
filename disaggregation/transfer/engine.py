"""The transfer engine: pushes KV pages to peers and checks received pages while the model worker computes.

    push … push(last) ─▶ slices, round robin over hand-overs ─▶ SendProgress* ─▶ all landed ─▶ SendEnded
    CancelSend ─▶ no new slice; those under way land ─▶ SendEnded(cancelled)
    the link goes down ─▶ PeerLinkDown ─▶ SendEnded(error) for each of the peer's hand-overs

One thread (``start``) owns the transfer backend and all state, and sleeps while there is nothing to do. Chunks are cut
into slices of a few MiB. So small hand-overs are sent between the slices of large ones, and a cancel takes effect soon.
Long chunks are sent while they are computed, layer by layer.

If a link breaks during a transfer, some slices may still land after ``SendEnded(error)``. Only the peer can know when
no more will, by its own ``PeerLinkDown``. Our own is sent before the ``SendEnded`` of the link's hand-overs.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...mem_cache.kv_pages.page_group import PageGroup
from ...mem_cache.kv_pages.page_order import PageConverter
from ...messages.base import I32, HandoverId
from ...messages.worker import (
    AdmitPeer,
    CancelSend,
    ConnectPeer,
    DisconnectPeer,
    GrantPages,
    KVLayout,
    KVOrder,
    PagesByGroup,
    PagesVerified,
    PeerAdmitted,
    PeerConnected,
    PeerFailed,
    PeerLinkDown,
    RevokePages,
    SendEnded,
    SendPages,
    SendProgress,
    TransferCommand,
    TransferEvent,
    VerifyPages,
)
from ...runtime.layers_done import LayersDone
from ...runtime.refusal_log import RefusalLog
from ..errors import BadPages, TransferError
from .backends.base import Admitted, Completion, ConnectFailed, LinkEvent, LinkUp, TransferBackend
from .backends.load import make_backend
from .outgoing_pages import PROGRESS_SECONDS, OutgoingPages
from .page_check import Landed, PageCheck, make_check
from .page_checksums import PageChecksums
from .page_pool import pool_of
from .page_write import unpack_pages

log = logging.getLogger(__name__)

SLICE_BYTES = 4 << 20
"""Size of a slice."""
WINDOW_BYTES = 16 << 20
"""Bytes under way to a peer at which no slice is started. Enough to keep a fast link busy between slices."""
WINDOW_SLICES = 64
"""Maximum number of slices under way to a peer."""
CHECK_BYTES = 4 << 20
"""Bytes of received pages that are checked per tick."""
MAX_PAGE = 1 << 31
"""Upper bound (exclusive) of page numbers in pools with an unknown size."""
MAX_BROKEN = 4096
"""Maximum number of failed hand-overs that are remembered while more of their pages may come."""
MAX_DOWN = 4096
"""Maximum number of peers with a remembered last link."""
CLOSE_SECONDS = 5.0
"""Seconds that ``close`` waits for the thread to end."""
BRISK_SECONDS = 0.02
"""Seconds after the last progress in which writes are polled at short intervals.

A slice that moves at all takes less time. The limit keeps a stalled peer from costing a core.
"""
NAP_SECONDS = 0.0001
"""Poll interval within ``BRISK_SECONDS``, for backends that do not signal a completed write.

The thread sleeps in between, because the transfer library needs the core.
"""
POLL_SECONDS = 0.001
"""Poll interval after ``BRISK_SECONDS``. The operating system can't wait for less."""
LAYER_POLL_SECONDS = 0.002
"""Poll interval for computed layers."""


def end_process(error: BaseException) -> None:
    """End the process after a failure of the engine: a worker that can't transfer must not look healthy."""
    log.critical("the transfer engine failed; ending the process", exc_info=error)
    logging.shutdown()
    os._exit(1)  # sys.exit would end this thread only


class _Push(NamedTuple):
    """Command to push pages while they are computed."""

    command: SendPages
    done: LayersDone


@dataclass(slots=True)
class _Window:
    """Slices and bytes that are under way to one peer."""

    slices: int = 0
    nbytes: int = 0

    @property
    def open(self) -> bool:
        return self.slices < WINDOW_SLICES and self.nbytes < WINDOW_BYTES


class TransferEngine:
    """Executor of ``TransferCommand``. Every answer goes to ``emit``, which only the engine's thread calls.

    After a ``PeerLinkDown`` of an epoch, ``AdmitPeer`` or ``ConnectPeer`` must be answered before that epoch is asked
    to connect again. Before the first connection this is harmless. A ``DisconnectPeer`` that crosses the
    ``PeerLinkDown`` of its link gets no second answer.

    If a hand-over fails before its last pages are submitted, later pages of it are dropped: a checksum over them alone
    would be wrong.
    """

    def __init__(
        self,
        backend: str | TransferBackend,
        groups: Sequence[PageGroup | None],
        epoch: str,
        host: str,
        emit: Callable[[TransferEvent], None],
        on_failure: Callable[[BaseException], None] = end_process,
        layout: KVLayout | None = None,
        port: int = 0,
        advertise_host: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the pools of ``groups`` to peers at once. Raises ``UnknownBackend`` and ``RegionError``.

        - ``groups``: the layout's groups, in its order. None stands for a group without bytes, where pages are only
          numbers. Either all pools are on a device, or none is.
        - ``host`` and ``port``: address to listen on. ``advertise_host``: address at which other instances reach it.
        - ``layout``: layout of the pages. Without it, pages of another order are refused.
        - ``on_failure``: called in the engine's thread if that thread fails.
        """
        self._backend = (
            make_backend(backend, epoch, host, port, advertise_host) if isinstance(backend, str) else backend
        )
        moved = [group for group in groups if group is not None]
        self.metadata = self._backend.register(moved)
        self._layout = layout
        self._pools = [g if g is None else pool_of(g, moved.index(g)) for g in groups]
        self._is_staged = self._backend.can.moves_data and any(group.staging is not None for group in moved)
        self._most = [MAX_PAGE if pool is None else pool.group.num_pages for pool in self._pools]
        self._unbounded = [MAX_PAGE] * len(self._pools)
        self._emit = emit
        self._clock = clock
        self._on_failure = on_failure
        # Any stranger may make the scheduler connect to an alleged peer, so failures don't get a log line each.
        self._refusals = RefusalLog(log, "connecting to peers")
        self._partings = RefusalLog(log, "parting from peers", logging.INFO)
        self._commands: queue.SimpleQueue[TransferCommand | _Push | None] = queue.SimpleQueue()
        self._outgoing: dict[HandoverId, OutgoingPages] = {}
        self._turns: deque[OutgoingPages] = deque()
        self._windows: dict[str, _Window] = {}
        self._broken: dict[HandoverId, None] = {}
        self._checks: deque[PageCheck] = deque()
        self._granted: dict[HandoverId, str] = {}
        """Peer that may write, by hand-over."""
        self._landed: dict[HandoverId, PageChecksums] = {}
        """Checksums of received pages that are on a device, until they are checked or revoked."""
        self._links: dict[str, int] = {}
        """Number of the current link, by peer."""
        self._writing: dict[str, int] = {}
        """Number of the link for writing to a peer, by peer."""
        self._parting: dict[str, int] = {}
        """Number of a link that is going down on the scheduler's request, by peer."""
        self._down: dict[str, int] = {}
        """Number of the last link that went down, by peer."""
        self._computing = False
        """Whether pages waited for their layers to be computed when they were last checked."""
        self._moved = 0.0
        """Time at which a slice was last started or found to have landed."""
        self.working = False
        """Whether the last tick left something to push or to check."""
        self._thread: threading.Thread | None = None

    def start(self) -> TransferEngine:
        """Run the engine in a thread of its own until ``close``, and return it."""
        self._thread = threading.Thread(target=self._run, name="transfer-engine", daemon=True)
        self._thread.start()
        return self

    def submit(self, command: TransferCommand) -> None:
        """Queue a command. Thread-safe, never waits."""
        self._commands.put(command)
        self._backend.wake()

    def push(self, command: SendPages, done: LayersDone) -> None:
        """Push pages as their layers are ``done``. Thread-safe, never waits.

        Call ``wake`` when all layers are done. Requires an engine with a ``layout``.
        """
        assert self._layout is not None
        self._commands.put(_Push(command, done))
        self._backend.wake()

    def wake(self) -> None:
        """Make the engine check at once for something to do. Thread-safe."""
        self._backend.wake()

    def close(self) -> None:
        """End all links and the thread at once, without further events. The pools may be closed afterwards."""
        self._commands.put(None)
        self._backend.wake()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                raise TransferError(f"the transfer engine did not end within {CLOSE_SECONDS:g} s")
        self._backend.close()
        for pool in self._pools:
            if pool is not None:
                pool.memory.release()

    def turn(self, *, wait: bool) -> bool:
        """Run one tick: execute commands, push and check a piece, and handle events. Return False once closed.

        ``wait``: wait for an event if there is nothing to do.
        """
        if not self._obey():
            return False
        pushed = self._push()
        checking = self._check()
        self.working = pushed or checking
        for event in self._backend.progress(self._pause() if wait and not self.working else 0.0):
            self._on_link(event)
        self._reap()
        return True

    def _pause(self) -> float | None:
        """Return the longest time to wait for an event, in seconds; None for no limit.

        Sleeps for ``NAP_SECONDS`` first if the wait should be shorter than the operating system supports.
        """
        completion = self._backend.can.completion
        if completion in (Completion.POLLED, Completion.DRIVEN) and any(o.landing for o in self._outgoing.values()):
            if self._clock() > self._moved + BRISK_SECONDS:
                return POLL_SECONDS
            if completion is Completion.POLLED:
                time.sleep(NAP_SECONDS)
            return 0.0
        return LAYER_POLL_SECONDS if self._computing else None

    def _run(self) -> None:
        try:
            while self.turn(wait=True):
                pass
        except BaseException as e:  # noqa: BLE001
            # After any exception this thread ends. Continuing without it would leave requests hanging.
            self._on_failure(e)

    # Commands

    def _obey(self) -> bool:
        """Execute the commands since the last call. Return False if the engine is to end."""
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return True
            match command:
                case SendPages():
                    self._send(command, None)
                case _Push():
                    self._send(*command)
                case CancelSend():
                    self._cancel(command.handover)
                case VerifyPages():
                    self._verify(command)
                case GrantPages():
                    self._grant(command)
                case RevokePages():
                    self._revoke(command)
                case AdmitPeer() | ConnectPeer():
                    self._open(command)
                case DisconnectPeer():
                    self._disconnect(command)
                case None:
                    return False

    def _open(self, command: AdmitPeer | ConnectPeer) -> None:
        peer, link = command.peer, command.link
        if link <= max(self._parting.get(peer, 0), self._down.get(peer, 0)):
            return  # it crossed the end of its link
        self._links[peer] = link
        if isinstance(command, ConnectPeer):
            if self._writing.get(peer) != link:
                # The scheduler connects again only after the last link's hand-overs ended, so they get no more pages.
                self._broken = {handover: None for handover in self._broken if handover.epoch != peer}
                self._writing[peer] = link
            self._backend.connect(command.peer, command.metadata)
        else:
            self._backend.admit(command.peer)

    def _disconnect(self, command: DisconnectPeer) -> None:
        peer, link = command.peer, command.link
        # Link numbers increase, so a late command (queued after a step) with a smaller one means a link that ended.
        if link > self._down.get(peer, 0) and link >= self._links.get(peer, 0):
            self._links[peer] = self._parting[peer] = link
            self._backend.disconnect(peer)

    def _grant(self, command: GrantPages) -> None:
        try:
            granted = self._unpack(command.pages, "destination")
            landed = self._to_land(command) if self._is_staged else None
        except (BadPages, ValueError) as e:
            log.error("can't grant room %d its pages: %s", command.handover.room, e)
            return
        if landed is not None:
            self._landed[command.handover] = landed
            self._backend.note_checksums_in(command.peer, command.handover, landed)
        self._granted[command.handover] = command.peer
        for pool, pages in zip(self._pools, granted, strict=True):
            if pool is not None:
                self._backend.grant(command.peer, command.handover, pages, pool.number)

    def _to_land(self, command: GrantPages) -> PageChecksums:
        numbers = [number for number, pool in enumerate(self._pools) if pool is not None]
        return PageChecksums(self._layout, command.order, numbers, summed=command.checksum)

    def _unpack(self, pages: PagesByGroup, what: str, *, theirs: bool = False) -> list[I32]:
        """Return the page numbers of each group, of our pools or of a peer's (``theirs``). Raises ``BadPages``."""
        if len(pages) != len(self._pools):
            raise BadPages(f"{what} pages of {len(pages)} groups where there are {len(self._pools)}")
        most = self._unbounded if theirs else self._most
        return [unpack_pages(packed, count, what) for packed, count in zip(pages, most, strict=True)]

    def _revoke(self, command: RevokePages) -> None:
        peer = self._granted.pop(command.handover, None)
        if not command.are_checked:
            self._landed.pop(command.handover, None)
        if peer is not None:
            self._backend.revoke(peer, command.handover)

    def _send(self, command: SendPages, done: LayersDone | None) -> None:
        handover = command.handover
        if handover in self._broken:
            if command.last:
                del self._broken[handover]
            return
        outgoing = self._outgoing.get(handover)
        if outgoing is None:
            outgoing = OutgoingPages(handover, self._pools, self._clock, summed=command.checksum)
            self._outgoing[handover] = outgoing
            if handover.epoch not in self._writing:
                # Fail it now: when its first slice is due, there may be a new link, which is for other hand-overs.
                outgoing.fail(f"peer {handover.epoch} is not connected")
        waiting = outgoing.pending
        outgoing.whole = command.last
        try:
            src = self._unpack(command.src_pages, "source")
            dst = self._unpack(command.dst_pages, "destination", theirs=True)
            counts, others = list(map(len, src)), list(map(len, dst))
            if counts != others:
                raise BadPages(f"room {handover.room} was given {counts} pages of its groups for {others}")
        except BadPages as e:
            outgoing.fail(str(e))
        else:
            for group, pool in enumerate(self._pools) if outgoing.error is None else ():
                if pool is not None:
                    outgoing.add(group, src[group], dst[group], done)
        if outgoing.pending and not waiting:
            self._turns.append(outgoing)
        self._end_if_over(outgoing)

    def _cancel(self, handover: HandoverId) -> None:
        self._broken.pop(handover, None)
        outgoing = self._outgoing.get(handover)
        if outgoing is None:
            self._emit(SendEnded(handover, cancelled=True))
            return
        outgoing.cancel()
        self._end_if_over(outgoing)

    def _verify(self, command: VerifyPages) -> None:
        if not self._backend.can.moves_data:
            self._emit(PagesVerified(command.handover, ok=True))
            return
        try:
            landed = [
                Landed(group, pool, pages, None if self._is_staged else self._converter(command.order, group))
                for group, (pool, pages) in enumerate(
                    zip(self._pools, self._unpack(command.pages, "landed"), strict=True)
                )
                if pool is not None
            ]
            passed = self._landed.pop(command.handover, None) if self._is_staged else None
            check = make_check(command, landed, passed)
        except (BadPages, ValueError) as e:
            log.error("can't verify room %d: %s", command.handover.room, e)
            self._emit(PagesVerified(command.handover, ok=False))
            return
        self._checks.append(check)

    def _converter(self, order: KVOrder | None, group: int) -> PageConverter | None:
        """Return the converter of a group's pages from ``order`` to our order; None if they are equal.

        Raises ``ValueError`` if our own order is unknown.
        """
        if order is None or (self._layout is not None and order == self._layout.order):
            return None
        if self._layout is None:
            raise ValueError(f"pages in the order {order!r}, and nothing is known of our own")
        return PageConverter(self._layout, order, group)

    # Work

    def _push(self) -> bool:
        """Start slices, round robin over hand-overs, until they add up to a full slice.

        Return False if none could be started.
        """
        pushed = 0
        self._computing = False
        for _ in range(len(self._turns)):
            outgoing = self._turns.popleft()
            if not outgoing.pending:
                continue  # it failed, or was cancelled
            window = self._windows.setdefault(outgoing.handover.epoch, _Window())
            ready = outgoing.ready
            self._computing = self._computing or not ready
            if window.open and ready:
                try:
                    nbytes = outgoing.push_slice(self._backend, SLICE_BYTES)
                except TransferError as e:
                    outgoing.fail(str(e))
                    self._end_if_over(outgoing)
                    continue
                self._moved = self._clock()
                window.slices += 1
                window.nbytes += nbytes
                pushed += nbytes
            if outgoing.pending:
                self._turns.append(outgoing)
            if pushed >= SLICE_BYTES:
                break
        return pushed > 0

    def _check(self) -> bool:
        """Hash or convert a part of the received pages that wait for it. Return False if none is left."""
        if self._checks:
            check = self._checks.popleft()
            ok = check.step(CHECK_BYTES)
            if ok is None:
                self._checks.append(check)
            else:
                self._emit(PagesVerified(check.handover, ok))
        return bool(self._checks)

    def _reap(self) -> None:
        for outgoing in [outgoing for outgoing in self._outgoing.values() if outgoing.landing]:
            self._reap_one(outgoing)
            self._end_if_over(outgoing)

    def _reap_one(self, outgoing: OutgoingPages) -> None:
        slices, nbytes = outgoing.reap(self._backend)
        if slices:
            self._moved = self._clock()
            window = self._windows[outgoing.handover.epoch]
            window.slices -= slices
            window.nbytes -= nbytes
            if self._moved - outgoing.told_at >= PROGRESS_SECONDS:
                outgoing.told_at = self._moved
                self._emit(SendProgress(outgoing.handover, outgoing.nbytes))
        if outgoing.lost and outgoing.handover.epoch in self._writing:
            # Only the end of the link guarantees that nothing more is read here or lands there.
            del self._writing[outgoing.handover.epoch]
            self._backend.disconnect(outgoing.handover.epoch)

    def _end_if_over(self, outgoing: OutgoingPages) -> None:
        if not outgoing.over:
            return
        del self._outgoing[outgoing.handover]
        if outgoing.error is not None and not outgoing.whole and not outgoing.cancelled:
            self._broken[outgoing.handover] = None
            if len(self._broken) > MAX_BROKEN:
                del self._broken[next(iter(self._broken))]
        self._emit(outgoing.ended())

    def _on_link(self, event: LinkEvent) -> None:
        match event:
            case LinkUp():
                self._emit(PeerConnected(event.peer, self._links.get(event.peer, 0)))
            case Admitted():
                self._emit(PeerAdmitted(event.peer, self._links.get(event.peer, 0)))
            case ConnectFailed():
                self._refusals.add(event.error)
                self._emit(PeerFailed(event.peer, self._links.get(event.peer, 0), event.error))
            case _:
                self._partings.add(f"the links with peer {event.peer} are down: {event.reason}")
                link = self._links.pop(event.peer, 0)
                self._parting.pop(event.peer, None)
                self._writing.pop(event.peer, None)
                self._down.pop(event.peer, None)  # so that the order stays that of ending
                self._down[event.peer] = link
                if len(self._down) > MAX_DOWN:
                    del self._down[next(iter(self._down))]
                self._emit(PeerLinkDown(event.peer, link))
                for outgoing in [o for o in self._outgoing.values() if o.handover.epoch == event.peer]:
                    self._reap_one(outgoing)
                    if not outgoing.over:
                        outgoing.fail(f"the link to peer {event.peer} is down: {event.reason}")
                    self._end_if_over(outgoing)
                self._windows.pop(event.peer, None)
