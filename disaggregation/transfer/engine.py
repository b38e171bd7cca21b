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
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...mem_cache.kv_pages.page_group import PageGroup
from ...messages.worker import (
    AdmitPeer,
    CancelSend,
    ConnectPeer,
    DisconnectPeer,
    GrantPages,
    KVLayout,
    PeerAdmitted,
    PeerConnected,
    PeerFailed,
    PeerLinkDown,
    RevokePages,
    SendPages,
    TransferCommand,
    TransferEvent,
    VerifyPages,
)
from ...runtime.layers_done import LayersDone
from ...runtime.refusal_log import RefusalLog
from ..errors import TransferError
from .backends.base import Admitted, Completion, ConnectFailed, LinkEvent, LinkUp, TransferBackend
from .backends.load import make_backend
from .open_pools import OpenPools
from .push_queue import PushQueue
from .received_pages import ReceivedPages

log = logging.getLogger(__name__)

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
    """Log ``error`` and end the process with status 1: a worker that can't transfer must not look healthy."""
    log.critical("the transfer engine failed; ending the process", exc_info=error)
    logging.shutdown()
    os._exit(1)  # sys.exit would end this thread only


class _Push(NamedTuple):
    """Command to push pages while they are computed."""

    command: SendPages
    done: LayersDone


class TransferEngine:
    """Executor of ``TransferCommand``. Every answer goes to ``emit``, which only the engine's thread calls.

    After a ``PeerLinkDown`` of an epoch, ``AdmitPeer`` or ``ConnectPeer`` must be answered before that epoch is asked
    to connect again. Before the first connection this is harmless. A ``DisconnectPeer`` that crosses the
    ``PeerLinkDown`` of its link gets no second answer.
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
        - ``epoch``: name of this run of the instance, by which peers know it.
        - ``host`` and ``port``: address to listen on. ``advertise_host``: address at which other instances reach it.
        - ``emit``: called in the engine's thread with each event for the scheduler.
        - ``layout``: layout of the pages. Without it, pages of another order are refused.
        - ``on_failure``: called in the engine's thread if that thread fails.
        """
        self._backend = (
            make_backend(backend, epoch, host, port, advertise_host) if isinstance(backend, str) else backend
        )
        self.metadata = self._backend.register([group for group in groups if group is not None])
        self._layout = layout
        self._pools = OpenPools(groups)
        self._pushes = PushQueue(self._backend, self._pools, emit, clock)
        self._received = ReceivedPages(self._backend, self._pools, layout, emit)
        self._emit = emit
        self._clock = clock
        self._on_failure = on_failure
        # Any stranger may make the scheduler connect to an alleged peer, so failures don't get a log line each.
        self._refusals = RefusalLog(log, "connecting to peers")
        self._partings = RefusalLog(log, "parting from peers", logging.INFO)
        self._commands: queue.SimpleQueue[TransferCommand | _Push | None] = queue.SimpleQueue()
        self._links: dict[str, int] = {}
        """Number of the current link, by peer."""
        self._parting: dict[str, int] = {}
        """Number of a link that is going down on the scheduler's request, by peer."""
        self._down: dict[str, int] = {}
        """Number of the last link that went down, by peer."""
        self.working = False
        """Whether the last tick left something to push or to check."""
        self._thread: threading.Thread | None = None

    def start(self) -> TransferEngine:
        """Run the engine in a thread of its own until ``close``, and return it."""
        self._thread = threading.Thread(target=self._run, name="transfer-engine", daemon=True)
        self._thread.start()
        return self

    def submit(self, command: TransferCommand) -> None:
        """Queue a command for the engine's thread. Thread-safe, never waits."""
        self._commands.put(command)
        self._backend.wake()

    def push(self, command: SendPages, done: LayersDone) -> None:
        """Queue pages to push, each layer when ``done`` counts it as computed. Thread-safe, never waits.

        Call ``wake`` when all layers are done. Requires an engine with a ``layout``.
        """
        assert self._layout is not None
        self._commands.put(_Push(command, done))
        self._backend.wake()

    def wake(self) -> None:
        """Make the engine check at once for something to do. Thread-safe."""
        self._backend.wake()

    def close(self) -> None:
        """End all links and the thread, without further events, and wait for the thread. The pools may be closed
        afterwards.

        Raises ``TransferError`` if the thread does not end within ``CLOSE_SECONDS``.
        """
        self._commands.put(None)
        self._backend.wake()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                raise TransferError(f"the transfer engine did not end within {CLOSE_SECONDS:g} s")
        self._backend.close()
        self._pools.close()

    def turn(self, *, wait: bool) -> bool:
        """Run one tick: execute commands, push and check a part of the pages, and handle events. Return False once
        closed.

        ``wait``: wait for an event if there is nothing to do.
        """
        if not self._obey():
            return False
        pushed = self._pushes.push()
        checking = self._received.check()
        self.working = pushed or checking
        for event in self._backend.progress(self._pause() if wait and not self.working else 0.0):
            self._on_link(event)
        self._pushes.reap()
        return True

    def _pause(self) -> float | None:
        """Return how many seconds the tick may wait for an event; None for no limit.

        If it should wait less than the operating system can, sleep for ``NAP_SECONDS`` and return 0.
        """
        completion = self._backend.can.completion
        if completion in (Completion.POLLED, Completion.DRIVEN) and self._pushes.landing:
            if self._clock() > self._pushes.moved_at + BRISK_SECONDS:
                return POLL_SECONDS
            if completion is Completion.POLLED:
                time.sleep(NAP_SECONDS)
            return 0.0
        return LAYER_POLL_SECONDS if self._pushes.computing else None

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
                    self._pushes.send(command, None)
                case _Push():
                    self._pushes.send(*command)
                case CancelSend():
                    self._pushes.cancel(command.handover)
                case VerifyPages():
                    self._received.verify(command)
                case GrantPages():
                    self._received.grant(command)
                case RevokePages():
                    self._received.revoke(command)
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
            self._pushes.use_link(peer, link)
            self._backend.connect(command.peer, command.metadata)
        else:
            self._backend.admit(command.peer)

    def _disconnect(self, command: DisconnectPeer) -> None:
        peer, link = command.peer, command.link
        # Link numbers increase, so a late command (queued after a step) with a smaller one means a link that ended.
        if link > self._down.get(peer, 0) and link >= self._links.get(peer, 0):
            self._links[peer] = self._parting[peer] = link
            self._backend.disconnect(peer)

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
                self._pushes.lose_link(event.peer)
                self._down.pop(event.peer, None)  # so that the order stays that of ending
                self._down[event.peer] = link
                if len(self._down) > MAX_DOWN:
                    del self._down[next(iter(self._down))]
                self._emit(PeerLinkDown(event.peer, link))
                self._pushes.end_peer(event.peer, event.reason)
