"""A prefill and a decode instance over simulated workers, a transfer engine that copies one page at a time, and a
control plane.

The control plane delivers on demand. Nothing happens by itself: a test (or chance) picks what moves next, so every
interleaving is reachable.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

from pdserve.disaggregation.handover import receiver_table, sender_table
from pdserve.disaggregation.handover.limits import HandoverLimits
from pdserve.disaggregation.handover.peer import Peer, PeerState, Reading, Writing
from pdserve.disaggregation.handover.placement_policy import PlacementPolicy
from pdserve.disaggregation.handover.receiver_table import ReceiverTable
from pdserve.disaggregation.handover.sender_table import SenderTable
from pdserve.messages.base import HandoverId, Message, unpack_i32
from pdserve.messages.worker import (
    CancelSend,
    DisconnectPeer,
    ForwardStep,
    GrantPages,
    PagesVerified,
    RevokePages,
    SendEnded,
    SendPages,
    SendProgress,
    SliceChecksum,
    VerifyPages,
)
from pdserve.runtime.metrics import read
from support.sim import NO_WINDOW, SimInstance, SimWindow, make_options

LIMITS = HandoverLimits(bootstrap=5.0, queue=20.0, transfer=5.0)


@dataclass
class Push:
    """A hand-over on its way through the engine. ``pages``: their group, here and there; ``counts``: those that have
    been copied, by group.
    """

    pages: deque[tuple[int, int, int]] = field(default_factory=deque)
    whole: bool = False
    counts: Counter[int] = field(default_factory=Counter)
    slices: list[SliceChecksum] = field(default_factory=list)
    nbytes: int = 0


def numbered(pages) -> list[tuple[int, int]]:
    """Return pages with the numbers of their groups."""
    return [(group, page) for group, packed in enumerate(pages) for page in unpack_i32(packed).tolist()]


def in_order(piece: SliceChecksum) -> tuple[int, int]:
    """Return the group and first page of a slice, which identify it."""
    return piece.group, piece.first


def make_peer(epoch: str, number: int = 1, **directions) -> Peer:
    """Make a peer that is connected."""
    return Peer(number, PeerState.OPEN, epoch=epoch, down=False, **directions)


class SimSide(SimInstance):
    """One instance of the pair, with the part of ``KVManager`` that the scheduler sees."""

    def __init__(self, pair: SimPair, mode: str, window: SimWindow, host_pages: int = 0, **changes) -> None:
        super().__init__(make_options(disaggregation_mode=mode, **changes), window=window, host_pages=host_pages)
        self.pair = pair
        self.choice = PlacementPolicy(self.options.disaggregation_threshold, self.scheduler.estimator)
        self.senders = SenderTable(self.scheduler, mode, self.options.page_size, LIMITS, self.choice)
        reach = lambda host, port, now: pair.link if pair.is_closing else pair.open_link()  # noqa: E731
        self.receivers = ReceiverTable(self.scheduler, mode, LIMITS, reach, self.choice)
        self.scheduler.handovers = self
        self.membership = self

    @property
    def rooms(self):
        """Return the hand-overs of the direction that this side is for."""
        return self.senders if self.scheduler.role == "prefill" else self.receivers

    def refusal(self) -> None:
        """See ``Membership``: hand-overs are taken."""

    def names_here(self, where) -> bool:
        """See ``KVManager``: by their role alone."""
        return self.scheduler.role == "prefill"

    def on_finished(self, req) -> None:
        """See ``KVManager``: nothing is given back."""

    def add(self, req, where, now) -> None:
        """See ``KVManager``."""
        if self.rooms is self.senders:
            self.senders.add(req, where.room, now)
        else:
            self.receivers.add(req, where, now)

    def cancel(self, req, reason) -> None:
        """See ``KVManager``."""
        self.rooms.cancel(req, reason)

    def on_first_token(self, req, now) -> None:
        """See ``KVManager``."""
        self.choice.on_first_token(req, now)

    def pinned(self):
        """See ``KVManager``."""
        return self.senders.pinned() + self.receivers.pinned()

    def take_computed_pages(self, req):
        """See ``KVManager``."""
        return self.senders.pushes.take_computed_pages(req)

    def on_prompt_computed(self, req, token, logprob) -> None:
        """See ``KVManager``."""
        self.senders.pushes.on_prompt_computed(req, token, logprob)

    def metrics(self):
        """Read the metrics of the hand-over tables. The peers of ``KVManager`` have no tables here."""
        return read(sender_table.METRICS, self.senders) + read(receiver_table.METRICS, self.receivers)

    def transfer(self) -> None:
        """Carry out the oldest command that waits for no step."""
        self.on_command(self.to_transfer.messages.popleft())
        self.outbox.flush()
        self._read()

    def on_command(self, message: Message) -> None:
        """Transfer commands reach the engine in order with the steps."""
        self.pair.engine(self, message)


class SimPair:
    """See the module."""

    def __init__(self, window: SimWindow = NO_WINDOW, **changes) -> None:
        self.now = 1.0
        self.prefill = self.make_side("prefill", window, **changes)
        self.decode = self.make_side("decode", window, **changes)
        self.to_prefill: deque[Message] = deque()
        self.to_decode: deque[Message] = deque()
        self.pushes: dict[HandoverId, Push] = {}
        self.granted: dict[HandoverId, set[tuple[int, int]]] = {}
        """Groups and pages."""
        self.corrupt = False
        self.stale: list[Message] = []
        self.link: Peer | None = None
        """The prefill, as the decode sees it."""
        self.peer: Peer | None = None
        """The decode, as the prefill sees it."""
        self.links = 0
        self.open_link()

    def make_side(self, mode: str, window: SimWindow, **changes) -> SimSide:
        """Make one of the two sides."""
        return SimSide(self, mode, window, **changes)

    @property
    def is_closing(self) -> bool:
        """The one link is gone, and not down."""
        return self.link is not None and self.link.gone and not self.link.down

    def open_link(self) -> Peer:
        """Return the one link, or a fresh one after the last has gone."""
        if self.link is None or self.link.gone:
            assert self.link is None or self.link.down, "a link is opened over one that is not down"
            self.links += 1
            self.link = make_peer("prefill", self.links, reading=Reading.READY)
            self.peer = make_peer("decode", self.links, writing=Writing.READY)
        return self.link

    def submit(self, rid: str, prompt, room: int, legs=("prefill", "decode"), **kwargs) -> None:
        """Submit both legs of a request, or one of them."""
        for leg in legs:
            getattr(self, leg).submit(rid, prompt, room=room, **kwargs)

    # --- what can move ---

    def moves(self):
        """Return everything that could happen next."""
        moves = [self.prefill.plan, self.decode.plan, self.advance]
        moves += [side.work for side in (self.prefill, self.decode) if side.to_worker.messages]
        moves += [side.transfer for side in (self.prefill, self.decode) if side.to_transfer.messages]
        moves += [self.deliver_to_prefill] if self.to_prefill else []
        moves += [self.deliver_to_decode] if self.to_decode else []
        moves += [lambda name=name: self.copy(name) for name, p in self.pushes.items() if self.can_copy(name, p)]
        return moves

    def can_copy(self, name: HandoverId, push: Push) -> bool:
        """Return whether a hand-over's push can go on: the receiver's engine may be behind its scheduler."""
        return name in self.granted if push.pages else push.whole

    def advance(self) -> None:
        """Let the managers of both sides advance."""
        self.now += 0.001
        self.decode.receivers.advance(self.now)
        self.prefill.senders.tick(self.now)
        self.collect()

    def collect(self) -> None:
        """Put what both sides have sent on its way."""
        if self.link is not None and self.peer is not None:
            self.to_prefill.extend(self.link.unsent)
            self.to_decode.extend(self.peer.unsent)
            self.link.unsent, self.peer.unsent = [], []
        for side in (self.prefill, self.decode):
            side.outbox.flush()
            side._read()

    def deliver_to_prefill(self) -> None:
        """Deliver one control message to the prefill."""
        message = self.to_prefill.popleft()
        self.prefill.senders.handlers()[type(message)](self.peer, message, self.now)
        self.collect()

    def deliver_to_decode(self) -> None:
        """Deliver one control message to the decode."""
        message = self.to_decode.popleft()
        self.decode.receivers.handlers()[type(message)](self.link, message, self.now)
        self.collect()

    def engine(self, side: SimSide, message: Message) -> None:
        """Carry out a message to a worker's transfer engine."""
        if any(message is old for old in self.stale):
            side.senders.pushes.on_send_ended(SendEnded(message.handover, error="not connected"))
        elif isinstance(message, SendPages):
            push = self.pushes.setdefault(message.handover, Push())
            here, there = numbered(message.src_pages), numbered(message.dst_pages)
            push.pages.extend((group, src, dst) for (group, src), (_, dst) in zip(here, there, strict=True))
            push.whole = message.last
        elif isinstance(message, CancelSend):
            self.pushes.pop(message.handover, None)
            side.senders.pushes.on_send_ended(SendEnded(message.handover, cancelled=True))
        elif isinstance(message, VerifyPages):
            assert message.handover not in self.granted, "pages are checked that may still be written"
            counts: Counter[int] = Counter()
            sums = [
                self.sum_up(counts, group, self.page(self.decode, group, page))
                for group, page in numbered(message.pages)
            ]
            right = not message.checksum or sorted(sums, key=in_order) == sorted(message.slices, key=in_order)
            side.receivers.on_verified(PagesVerified(message.handover, right), self.now)
        elif isinstance(message, GrantPages):
            self.granted[message.handover] = set(numbered(message.pages))
        elif isinstance(message, RevokePages):
            del self.granted[message.handover]
        elif isinstance(message, DisconnectPeer):
            pass  # the test says when the link is down
        self.collect()

    def copy(self, handover: HandoverId) -> None:
        """Copy one page of a hand-over, read and written now, whatever happened meanwhile."""
        push = self.pushes[handover]
        if push.pages:
            group, src, dst = push.pages.popleft()
            assert (group, dst) in self.granted[handover], "a page is written that was not granted"
            values = self.page(self.prefill, group, src).copy()
            push.slices.append(self.sum_up(push.counts, group, values))
            push.nbytes += 8 * len(values)
            self.page(self.decode, group, dst)[:] = values + (1 if self.corrupt else 0)
            self.prefill.senders.pushes.on_progress(SendProgress(handover, push.nbytes))
        if not push.pages and push.whole:
            del self.pushes[handover]
            self.prefill.senders.pushes.on_send_ended(SendEnded(handover, push.slices, push.nbytes, 0.001))
        self.collect()

    @staticmethod
    def sum_up(counts: Counter[int], group: int, values) -> SliceChecksum:
        """Sum up the next page of a group of a hand-over."""
        counts[group] += 1
        return SliceChecksum(counts[group] - 1, 1, 0, 1, hash(tuple(values)) % (1 << 64), group)

    def page(self, side: SimSide, group: int, page: int):
        """Return a page of a worker's KV."""
        size = side.options.page_size
        return side.worker.pools()[group][page * size : (page + 1) * size]

    # --- death ---

    def lose_link(self) -> None:
        """Let both sides notice that the other is gone. Pages may still be on their way."""
        link = self.link
        for peer in (link, self.peer):
            peer.state, peer.reason = PeerState.GONE, "killed by the test"
        self.to_prefill.clear()
        self.to_decode.clear()
        self.decode.receivers.on_gone(link)
        self.prefill.senders.on_gone(self.peer)
        link.unsent, self.peer.unsent = [], []
        self.collect()

    def link_is_down(self) -> None:
        """Let both workers report that nothing is written any more.

        Pushes that the prefill's worker has yet to read find no connection: a later command makes the next one.
        """
        steps = [m for m in self.prefill.to_worker.messages if isinstance(m, ForwardStep)]
        self.stale += [push for step in steps for push in step.pushes]
        for handover in list(self.pushes):
            del self.pushes[handover]
            self.prefill.senders.pushes.on_send_ended(SendEnded(handover, error="link lost"))
        self.link.down = True
        self.decode.receivers.on_down(self.link)
        self.collect()

    def check(self) -> None:
        """Check the invariants of both sides."""
        self.prefill.scheduler.check_invariants()
        self.decode.scheduler.check_invariants()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do."""
        sides = (self.prefill, self.decode)
        return all(
            s.scheduler.is_idle and not s.rooms.rooms and not s.to_worker.messages and not s.to_transfer.messages
            for s in sides
        )


def run_until_idle(pair: SimPair, rng: random.Random | None = None, moves: int = 20_000) -> None:
    """Make random moves until both sides are idle."""
    rng = rng or random.Random(0)
    for i in range(moves):
        rng.choice(pair.moves())()
        if i % 8 == 0:
            pair.check()
        if pair.is_idle:
            return
    raise AssertionError(f"not idle: {pair.prefill.rooms.rooms} {pair.decode.rooms.rooms}")


def assert_all_returned(pair: SimPair) -> None:
    """Assert that neither side holds memory, and that no peer may write any."""
    for side in (pair.prefill, pair.decode):
        usage = side.scheduler.memory.pool.usage()
        assert (usage["in_use"], usage["rows_in_use"], usage.get("window_in_use", 0)) == (0, 0, 0)
    assert pair.granted == {}
    pair.check()


def until_delivered(pair: SimPair) -> None:
    """Deliver messages until none is under way."""
    pair.advance()
    while pair.to_prefill or pair.to_decode:
        if pair.to_prefill:
            pair.deliver_to_prefill()
        if pair.to_decode:
            pair.deliver_to_decode()
        pair.advance()
