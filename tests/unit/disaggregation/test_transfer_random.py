"""Random hand-overs between two engines: rooms end exactly once, what arrived is right, nothing is written after."""

from __future__ import annotations

import queue
from dataclasses import dataclass, field

import numpy as np
import pytest
from support import fake_cuda_driver
from support.handovers import named
from support.machine import limit
from support.slices import assert_summed_up
from support.staged_pools import held, pool_group, slabs_of, staged_group

from pdserve.disaggregation.transfer import push_queue
from pdserve.disaggregation.transfer.engine import TransferEngine
from pdserve.mem_cache.kv_pages.region import allocate_region
from pdserve.messages.base import pack_i32
from pdserve.messages.worker import (
    AdmitPeer,
    CancelSend,
    ConnectPeer,
    DisconnectPeer,
    GrantPages,
    PeerAdmitted,
    PeerConnected,
    PeerLinkDown,
    SendEnded,
    SendPages,
)

PAGE = 4096
PAGES = 2001
LIMIT = limit(20.0)
CANARY = 0xA5
OPERATIONS = 150


@dataclass
class Room:
    """What the test knows of a room."""

    number: int
    src: np.ndarray
    dst: np.ndarray
    pushed: int = 0
    cancelled: bool = False
    ends: list[SendEnded] = field(default_factory=list)


class Side:
    """An engine and its events."""

    def __init__(self, kind, epoch, *, staged=False):
        self.region = allocate_region(PAGE * PAGES, shared=kind == "shm")
        self.pool = np.frombuffer(self.region.buffer, dtype=np.uint8).reshape(PAGES, PAGE)
        self.events = queue.Queue()
        group = staged_group(self.pool, 24, slabs_of(2, 5 * PAGE)) if staged else pool_group(kind, self.region, PAGE)
        self.engine = TransferEngine(kind, [group], epoch, "127.0.0.1", self.events.put).start()


class Campaign:
    """Drives P as a scheduler would, and checks after each event what must hold from then on."""

    def __init__(self, kind, seed, staged=""):
        self.rng = np.random.default_rng(seed)
        self.p, self.d = (Side(kind, epoch, staged=epoch in staged) for epoch in "PD")
        self.p.pool[:] = self.rng.integers(0, 256, self.p.pool.shape)
        self.d.pool[:] = CANARY
        self.free = list(self.rng.permutation(np.arange(1, PAGES)))
        self.rooms: dict[int, Room] = {}
        self.quarantined: list[np.ndarray] = []
        self.link = 0
        self.connect()

    def connect(self):
        self.link += 1
        self.d.engine.submit(AdmitPeer("P", self.link))
        assert self.d.events.get(timeout=LIMIT) == PeerAdmitted("P", self.link)
        self.p.engine.submit(ConnectPeer("D", self.link, self.d.engine.metadata))
        while (event := self.p.events.get(timeout=LIMIT)) != PeerConnected("D", self.link):
            self.on_event(event)  # the answer to a cancel that crossed the end of its room

    def live(self):
        return [room for room in self.rooms.values() if not room.ends]

    def open_room(self):
        size = int(self.rng.choice([1, 3, 20, 600]))
        if size > len(self.free):
            return
        dst, self.free = np.array(self.free[:size]), self.free[size:]
        number = len(self.rooms) + 1
        self.rooms[number] = Room(number, self.rng.integers(1, PAGES, size), dst)
        self.d.engine.submit(GrantPages(named(number), "P", [pack_i32(dst)]))

    def push_chunk(self):
        rooms = [room for room in self.live() if room.pushed < len(room.src) and not room.cancelled]
        if rooms:
            room = rooms[self.rng.integers(len(rooms))]
            end = min(len(room.src), room.pushed + int(self.rng.integers(1, 300)))
            part = slice(room.pushed, end)
            room.pushed = end
            src, dst = [pack_i32(room.src[part])], [pack_i32(room.dst[part])]
            self.p.engine.submit(SendPages(named(room.number), src, dst, end == len(room.src)))

    def cancel(self):
        rooms = [room for room in self.live() if not room.cancelled]
        if rooms:
            room = rooms[self.rng.integers(len(rooms))]
            room.cancelled = True
            self.p.engine.submit(CancelSend(named(room.number)))

    def disconnect(self):
        """Part, from a random side; then link again."""
        one, peer = (self.p, "D") if self.rng.random() < 0.5 else (self.d, "P")
        one.engine.submit(DisconnectPeer(peer, self.link))
        while (event := self.p.events.get(timeout=LIMIT)) != PeerLinkDown("D", self.link):
            self.on_event(event)
        assert self.d.events.get(timeout=LIMIT) == PeerLinkDown("P", self.link)
        if self.rng.random() < 0.5:
            other, name = (self.d, "P") if one is self.p else (self.p, "D")
            other.engine.submit(DisconnectPeer(name, self.link))  # it crossed the end
        while any(room.pushed for room in self.live()):
            self.on_event(self.p.events.get(timeout=LIMIT))
        for pages in self.quarantined:
            self.d.pool[pages] = CANARY
            self.free += pages.tolist()
        self.quarantined.clear()
        self.connect()

    def on_event(self, event):
        assert isinstance(event, SendEnded), event
        room = self.rooms[event.handover.room]
        room.ends.append(event)
        if len(room.ends) > 1:
            # Only a cancel that crossed the end may be answered too.
            assert room.cancelled, room.ends
            assert len(room.ends) == 2, room.ends
            assert event == SendEnded(named(room.number), cancelled=True)
            return
        if event.error is not None:
            self.quarantined.append(room.dst)  # the link is down: D's own PeerLinkDown frees them
            return
        if not event.cancelled:
            assert room.pushed == len(room.src)
            assert event.nbytes == PAGE * len(room.src)
            assert np.array_equal(self.d.pool[room.dst], self.p.pool[room.src])
            assert_summed_up(self.d.pool, room.dst, event.slices)
        self.d.pool[room.dst] = CANARY
        self.free += room.dst.tolist()

    def drain_events(self):
        while not self.p.events.empty():
            self.on_event(self.p.events.get())

    def check_canary(self):
        assert (self.d.pool[self.free] == CANARY).all()

    def finish(self):
        while rooms := [room for room in self.live() if room.pushed < len(room.src) and not room.cancelled]:
            self.push_chunk()
            assert rooms
        while any(not room.ends for room in self.rooms.values()):
            self.on_event(self.p.events.get(timeout=LIMIT))
        self.p.engine.submit(DisconnectPeer("D", self.link))
        while (event := self.p.events.get(timeout=LIMIT)) != PeerLinkDown("D", self.link):
            self.on_event(event)
        assert self.d.events.get(timeout=LIMIT) == PeerLinkDown("P", self.link)
        self.check_canary()
        assert self.p.events.empty()
        assert self.d.events.empty()
        assert held(self.p.engine) == held(self.d.engine) == 0


@pytest.mark.parametrize(
    ("kind", "staged", "seed"),
    [(kind, "", seed) for kind in ("tcp", "shm", "cuda_ipc") for seed in range(2)]
    + [pytest.param(kind, "", seed, marks=pytest.mark.slow) for kind in ("tcp", "shm", "cuda_ipc") for seed in (2, 3)]
    + [("tcp", "PD", 4), ("shm", "PD", 5), ("tcp", "P", 6), ("shm", "P", 7), ("tcp", "D", 8), ("shm", "D", 9)],
)
def test_every_room_ends_once_and_nothing_is_written_after(kind, staged, seed, monkeypatch):
    fake_cuda_driver.install(monkeypatch)
    monkeypatch.setattr(push_queue, "SLICE_BYTES", 16 * PAGE)
    monkeypatch.setattr(push_queue, "WINDOW_BYTES", 64 * PAGE)
    campaign = Campaign(kind, seed, staged)
    operations = [campaign.open_room, campaign.push_chunk, campaign.cancel, campaign.disconnect]
    try:
        for choice in campaign.rng.choice(len(operations), OPERATIONS, p=[0.25, 0.6, 0.1, 0.05]):
            operations[choice]()
            campaign.drain_events()
            campaign.check_canary()
        campaign.finish()
        assert len(campaign.rooms) > 20
    finally:
        campaign.p.engine.close()
        campaign.d.engine.close()
