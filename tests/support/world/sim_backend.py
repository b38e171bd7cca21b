"""KV links of a world: a transfer backend with pages that cross one at a time.

The states of a pair are those of ``SocketBackend``: links fall together, and a peer that lost one is fenced until
admitted.

- As with ``tcp``, an owner that closes a link takes nothing more from it. What was written before may still land until
  the end of the link is seen, and a page that was not granted waits.
- As with ``shm`` (``lets_go``), the writer alone can end its access. It writes nothing after, and writes at once what
  it likes.
- As the worst of libraries (``hostile``), pages land in any order, granted or not, until the owner has closed the link.
  That includes the time after their writer's death, or after its report that it can't tell whether they will land.

Left out are the limits of time (5 s of a handshake, 10 s of a stall), and that a hanging process welcomes no peer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pdserve.disaggregation.errors import NotConnected
from pdserve.disaggregation.transfer.backends.base import (
    Admitted,
    Capabilities,
    ConnectFailed,
    LinkDown,
    LinkEvent,
    LinkUp,
    TransferBackend,
    WriteHandle,
    WriteState,
)
from pdserve.disaggregation.transfer.page_write import PageWrite
from pdserve.mem_cache.kv_pages.page_group import PageGroup
from pdserve.messages.base import I32, HandoverId
from support.world.world import World


@dataclass(eq=False)
class Link:
    """One direction. ``written``, ``owned``: whether its writer, and its owner, count it as open."""

    number: int
    writer: SimBackend
    owner: SimBackend | None = None
    written: bool = False
    owned: bool = False
    handles: list[WriteHandle] = field(default_factory=list)

    def channel(self, way: str) -> tuple[str, int, str]:
        """Return the channel of ``way``: "out" from the writer to the owner, "back" to the writer."""
        return "data", self.number, way


@dataclass(eq=False)
class Record:
    """The links with one epoch; see ``SocketBackend``."""

    outgoing: Link | None = None
    incoming: Link | None = None
    reason: str | None = None
    admit_next: bool = False
    connect_next: bytes | None = None


class SimBackend(TransferBackend):
    """See the module. ``on_ready``: there are events, or writes have ended."""

    def __init__(
        self, world: World, epoch: str, on_ready: Callable[[], None], *, lets_go: bool, hostile: bool = False
    ) -> None:
        self.epoch = epoch
        self.alive = True
        self.frozen = False
        self.corrupts = False
        """Whether what it writes arrives wrong."""
        self.loses = False
        """Whether the outcome of its next write stays unknown."""
        self.pools: list[tuple[memoryview, int]] = []
        """Memory of each group, and the bytes of one page."""
        self.granted: dict[tuple[int, int], tuple[str, HandoverId]] = {}
        """Peer and hand-over that may write each page, by group and page."""
        self._world = world
        self._on_ready = on_ready
        self._lets_go = lets_go
        self._hostile = hostile
        self.can = Capabilities(revokes=not lets_go, checks_grants=not lets_go and not hostile)
        self._peers: dict[str, Record] = {}
        self._fenced: set[str] = set()
        self._events: list[LinkEvent] = []

    # --- TransferBackend ---

    def register(self, groups: Sequence[PageGroup]) -> bytes:
        self.pools = [(group.region.view(), group.page_bytes) for group in groups]
        metadata = f"pool of {self.epoch}".encode()
        self._world.pools[metadata] = self
        return metadata

    def grant(self, peer: str, handover: HandoverId, pages: I32, group: int = 0) -> None:
        self.granted |= dict.fromkeys(((group, page) for page in pages.tolist()), (peer, handover))

    def revoke(self, peer: str, handover: HandoverId) -> None:
        self.granted = {page: who for page, who in self.granted.items() if who != (peer, handover)}

    def connect(self, peer: str, metadata: bytes) -> None:
        record = self._peers.setdefault(peer, Record())
        if record.reason is not None:
            record.connect_next = metadata
            return
        self._fenced.discard(peer)
        if record.outgoing is not None:
            if record.outgoing.written:
                self._events.append(LinkUp(peer))
            return
        link = record.outgoing = Link(self._world.number(), self)
        self._world.post(link.channel("out"), f"{self.epoch} links to {peer}", lambda: self._introduce(link, metadata))

    def admit(self, peer: str) -> None:
        record = self._peers.get(peer)
        if record is not None and record.reason is not None:
            record.admit_next = True
            return
        self._fenced.discard(peer)
        self._events.append(Admitted(peer))

    def write(self, pages: PageWrite) -> WriteHandle:
        peer = pages.handover.epoch
        record = self._peers.get(peer)
        link = record.outgoing if record is not None else None
        if link is None or not link.written:
            raise NotConnected(f"peer {peer} is not connected")
        handle = WriteHandle()
        link.handles.append(handle)
        both = list(zip(pages.src.tolist(), pages.dst.tolist(), strict=True))
        left = set(both)
        for here, there in both:
            self._post_page(link, handle, pages, here, there, left)
        if self.loses:
            self.loses = False
            handle.state, handle.error = WriteState.LOST, "nobody knows"
        return handle

    def poll(self, handle: WriteHandle) -> WriteState:
        return handle.state

    def disconnect(self, peer: str) -> None:
        record = self._peers.get(peer)
        if record is not None and (record.admit_next or record.connect_next is not None):
            record.admit_next, record.connect_next = False, None
            self._events.append(ConnectFailed(peer, "disconnected on request"))
        self._part(peer, "disconnected on request")

    def progress(self, timeout: float | None) -> list[LinkEvent]:
        events, self._events = self._events, []
        return events

    @property
    def has_events(self) -> bool:
        """Whether ``progress`` would return something."""
        return bool(self._events)

    def wake(self) -> None:
        """Do nothing: a caller that submits takes the turn itself."""

    def close(self) -> None:
        """Do nothing: the world ends with its last user."""

    # --- what the world does ---

    def links(self) -> list[Link]:
        """Return the links that are open at this end, or dialled."""
        both = [link for record in self._peers.values() for link in (record.outgoing, record.incoming)]
        return [link for link in both if link is not None]

    def on_end(self, link: Link, reason: str) -> None:
        """Handle the end of a link: the other end has closed it, or what carried it broke."""
        record = next((r for r in self._peers.values() if link in (r.outgoing, r.incoming)), None)
        if self.alive and record is not None:
            self._lost(link, record, reason)
            self._on_ready()

    def die(self, keep: Callable[[int], int]) -> None:
        """Kill the process. Of ``n`` pages that it has sent by a link, the first ``keep(n)`` arrive."""
        self.alive = False
        self._world.pools.pop(f"pool of {self.epoch}".encode(), None)
        for link in self.links():
            if link.writer is self:
                waiting = len(self._world.channels.get(link.channel("out"), ()))
                self._world.forget(link.channel("out"), keep(waiting))
                self._post_end(link, "out", "the writer died")
            else:
                self._post_end(link, "back", "the owner died")

    def _post_page(
        self, link: Link, handle: WriteHandle, pages: PageWrite, here: int, there: int, left: set[tuple[int, int]]
    ) -> None:
        group, writer = pages.group, (self.epoch, pages.handover)

        def land() -> None:
            self._land(link, handle, group, here, there, left)

        def ready() -> bool:
            owner = link.owner
            assert owner is not None
            if self._lets_go:
                return not self.frozen
            if owner.frozen and owner.alive:
                return False
            return self._hostile or not owner.alive or not link.owned or owner.granted.get((group, there)) == writer

        page = f"window page {there}" if group else f"page {there}"
        channel = link.channel(page if self._hostile else "out")
        if self.loses:
            channel = ("late", link.number, page)
        self._world.post(channel, f"{self.epoch} writes {page}", land, b"%d %d" % (here, there), ready)

    def _land(
        self, link: Link, handle: WriteHandle, group: int, here: int, there: int, left: set[tuple[int, int]]
    ) -> None:
        owner = link.owner
        assert owner is not None
        if not owner.alive or not link.owned or (self._lets_go and not link.written):
            return
        (ours, size), (theirs, _) = self.pools[group], owner.pools[group]
        theirs[there * size : (there + 1) * size] = ours[here * size : (here + 1) * size]
        if self.corrupts:
            theirs[(there + 1) * size - 8] ^= 1  # of the last token, which the next one is computed from
        left.discard((here, there))
        if not left and link.written and self.alive and handle.state is WriteState.PENDING:
            handle.state = WriteState.DONE
            link.handles.remove(handle)
            self._on_ready()

    def _introduce(self, link: Link, metadata: bytes) -> None:
        owner = self._world.pools.get(metadata)
        error = "nobody is there" if owner is None else owner.welcome(link)
        self._world.post(link.channel("back"), f"verdict {error!r}", lambda: self._on_verdict(link, error))

    def welcome(self, link: Link) -> str:
        """Accept a writer's introduction. Returns why it may not write, or ""."""
        writer = link.writer.epoch
        record = self._peers.get(writer)
        link.owner = self
        if record is not None and record.incoming is not None and record.reason is None:
            self._lost(record.incoming, record, "the peer opened another link")
        if writer in self._fenced:
            self._on_ready()
            return "its link went down; this instance has to register with it again"
        self._peers.setdefault(writer, Record()).incoming = link
        link.owned = True
        return ""

    def _on_verdict(self, link: Link, error: str) -> None:
        found = [(peer, record) for peer, record in self._peers.items() if record.outgoing is link]
        if not self.alive or not found:
            return
        peer, record = found[0]
        if error:
            record.outgoing = None
            self._connect_failed(peer, record, error)
        else:
            link.written = True
            self._events.append(LinkUp(peer))
        self._on_ready()

    def _connect_failed(self, peer: str, record: Record, error: str) -> None:
        if record.incoming is None and record.outgoing is None and record.reason is None:
            del self._peers[peer]
        self._events.append(ConnectFailed(peer, error))

    def _lost(self, link: Link, record: Record, reason: str) -> None:
        peer = next(name for name, other in self._peers.items() if other is record)
        if link is record.outgoing and not link.written:
            record.outgoing = None
            self._close(link, reason)
            self._connect_failed(peer, record, reason)
            return
        if link is record.incoming:
            record.incoming = None
            self._close(link, reason)
        self._part(peer, reason)

    def _close(self, link: Link, reason: str) -> None:
        if link.writer is self:
            link.written = False
            for handle in link.handles:
                handle.state, handle.error = WriteState.FAILED, reason
            link.handles.clear()
            self._post_end(link, "out", reason)
        else:
            link.owned = False
            self._post_end(link, "back", reason)

    def _post_end(self, link: Link, way: str, reason: str) -> None:
        def end() -> None:
            other = link.owner if way == "out" else link.writer
            if other is not None:
                other.on_end(link, reason)

        self._world.post(link.channel(way), f"link {link.number} ends {way}", end)

    def _part(self, peer: str, reason: str) -> None:
        record = self._peers.setdefault(peer, Record())
        self._fenced.add(peer)
        first = record.reason is None
        record.reason = record.reason or reason
        outgoing, record.outgoing = record.outgoing, None
        if outgoing is not None:
            if not outgoing.written:
                self._events.append(ConnectFailed(peer, reason))
            self._close(outgoing, reason)
        if record.incoming is not None:
            if self._lets_go and record.incoming.owned:
                if first:
                    self._post_end(record.incoming, "back", "asked to let go")
                return
            self._close(record.incoming, reason)
        del self._peers[peer]
        self._events.append(LinkDown(peer, record.reason))
        if record.admit_next:
            self.admit(peer)
        if record.connect_next is not None:
            self.connect(peer, record.connect_next)


class SimRegion:
    """A worker's KV as the region that its transfer engine moves."""

    def __init__(self, kv: np.ndarray) -> None:
        self._kv = kv
        self.nbytes = kv.nbytes

    def view(self) -> memoryview:
        """See ``KVRegion``."""
        return memoryview(self._kv).cast("B")
