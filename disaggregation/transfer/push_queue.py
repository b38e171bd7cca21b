"""The pages that are pushed to peers: in slices, round robin over hand-overs, in a window for each peer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ...messages.base import HandoverId
from ...messages.worker import SendEnded, SendPages, SendProgress, TransferEvent
from ...runtime.layers_done import LayersDone
from ..errors import BadPages, TransferError
from .backends.base import TransferBackend
from .open_pools import OpenPools
from .outgoing_pages import PROGRESS_SECONDS, OutgoingPages

SLICE_BYTES = 4 << 20
"""Size of a slice."""
WINDOW_BYTES = 16 << 20
"""Bytes under way to a peer at which no slice is started. Enough to keep a fast link busy between slices."""
WINDOW_SLICES = 64
"""Maximum number of slices under way to a peer."""
MAX_BROKEN = 4096
"""Maximum number of failed hand-overs that are remembered while more of their pages may come."""


@dataclass(slots=True)
class _Window:
    """Slices and bytes that are under way to one peer."""

    slices: int = 0
    nbytes: int = 0

    @property
    def open(self) -> bool:
        return self.slices < WINDOW_SLICES and self.nbytes < WINDOW_BYTES


class PushQueue:
    """The hand-overs with pages to push, and the slices of them that are under way.

    If a hand-over fails before its last pages are submitted, later pages of it are dropped: a checksum over them alone
    would be wrong.
    """

    def __init__(
        self,
        backend: TransferBackend,
        pools: OpenPools,
        emit: Callable[[TransferEvent], None],
        clock: Callable[[], float],
    ) -> None:
        self._backend = backend
        self._pools = pools
        self._emit = emit
        self._clock = clock
        self._outgoing: dict[HandoverId, OutgoingPages] = {}
        self._turns: deque[OutgoingPages] = deque()
        self._windows: dict[str, _Window] = {}
        self._broken: dict[HandoverId, None] = {}
        self._writing: dict[str, int] = {}
        """Number of the link for writing to a peer, by peer."""
        self.computing = False
        """Whether pages waited for their layers to be computed when they were last checked."""
        self.moved_at = 0.0
        """Time at which a slice was last started or found to have landed."""

    @property
    def landing(self) -> bool:
        """Whether any slice is under way."""
        return any(outgoing.landing for outgoing in self._outgoing.values())

    def use_link(self, peer: str, link: int) -> None:
        """Note that the worker's link number ``link`` to ``peer`` is used for pushing from now on."""
        if self._writing.get(peer) != link:
            # The scheduler connects again only after the last link's hand-overs ended, so they get no more pages.
            self._broken = {handover: None for handover in self._broken if handover.epoch != peer}
            self._writing[peer] = link

    def lose_link(self, peer: str) -> None:
        """Note that the link to ``peer`` is down: hand-overs that begin from now on fail."""
        self._writing.pop(peer, None)

    def end_peer(self, peer: str, reason: str) -> None:
        """Fail all hand-overs to ``peer``, after its link went down for ``reason``, and report their end."""
        for outgoing in [o for o in self._outgoing.values() if o.handover.epoch == peer]:
            self._reap_one(outgoing)
            if not outgoing.over:
                outgoing.fail(f"the link to peer {peer} is down: {reason}")
            self._end_if_over(outgoing)
        self._windows.pop(peer, None)

    def send(self, command: SendPages, done: LayersDone | None) -> None:
        """Queue pages of a hand-over, each layer to be pushed when ``done`` counts it as computed (None: all are).

        If the pages are invalid or the peer has no link, the hand-over fails.
        """
        handover = command.handover
        if handover in self._broken:
            if command.last:
                del self._broken[handover]
            return
        outgoing = self._outgoing.get(handover)
        if outgoing is None:
            outgoing = OutgoingPages(handover, self._pools.pools, self._clock, summed=command.checksum)
            self._outgoing[handover] = outgoing
            if handover.epoch not in self._writing:
                # Fail it now: when its first slice is due, there may be a new link, which is for other hand-overs.
                outgoing.fail(f"peer {handover.epoch} is not connected")
        waiting = outgoing.pending
        outgoing.whole = command.last
        try:
            src = self._pools.unpack(command.src_pages, "source")
            dst = self._pools.unpack(command.dst_pages, "destination", theirs=True)
            counts, others = list(map(len, src)), list(map(len, dst))
            if counts != others:
                raise BadPages(f"room {handover.room} was given {counts} pages of its groups for {others}")
        except BadPages as e:
            outgoing.fail(str(e))
        else:
            for group, _, pages in self._pools.pairs(src) if outgoing.error is None else ():
                outgoing.add(group, pages, dst[group], done)
        if outgoing.pending and not waiting:
            self._turns.append(outgoing)
        self._end_if_over(outgoing)

    def cancel(self, handover: HandoverId) -> None:
        """Push no more pages of a hand-over; ``SendEnded`` follows when the slices under way have landed."""
        self._broken.pop(handover, None)
        outgoing = self._outgoing.get(handover)
        if outgoing is None:
            self._emit(SendEnded(handover, cancelled=True))
            return
        outgoing.cancel()
        self._end_if_over(outgoing)

    def push(self) -> bool:
        """Start slices, round robin over hand-overs, until they add up to ``SLICE_BYTES``. Return False if none was
        started.
        """
        pushed = 0
        self.computing = False
        for _ in range(len(self._turns)):
            outgoing = self._turns.popleft()
            if not outgoing.pending:
                continue  # it failed, or was cancelled
            window = self._windows.setdefault(outgoing.handover.epoch, _Window())
            ready = outgoing.ready
            self.computing = self.computing or not ready
            if window.open and ready:
                try:
                    nbytes = outgoing.push_slice(self._backend, SLICE_BYTES)
                except TransferError as e:
                    outgoing.fail(str(e))
                    self._end_if_over(outgoing)
                    continue
                self.moved_at = self._clock()
                window.slices += 1
                window.nbytes += nbytes
                pushed += nbytes
            if outgoing.pending:
                self._turns.append(outgoing)
            if pushed >= SLICE_BYTES:
                break
        return pushed > 0

    def reap(self) -> None:
        """Record slices that have landed, and report progress and the hand-overs that are over to the scheduler."""
        for outgoing in [outgoing for outgoing in self._outgoing.values() if outgoing.landing]:
            self._reap_one(outgoing)
            self._end_if_over(outgoing)

    def _reap_one(self, outgoing: OutgoingPages) -> None:
        slices, nbytes = outgoing.reap(self._backend)
        if slices:
            self.moved_at = self._clock()
            window = self._windows[outgoing.handover.epoch]
            window.slices -= slices
            window.nbytes -= nbytes
            if self.moved_at - outgoing.reported_at >= PROGRESS_SECONDS:
                outgoing.reported_at = self.moved_at
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
