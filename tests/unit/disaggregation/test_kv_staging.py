"""Pages of pools on a device, which go and come through host memory that is smaller than what a hand-over moves."""

from __future__ import annotations

import queue
import socket
import threading

import msgspec
import numpy as np
import pytest
import torch
from support.copy_library import CopyLibrary
from support.handovers import named
from support.machine import limit
from support.processes import wait_until
from support.recording_device import RecordingDevice
from support.staged_pools import held, slabs_of, staged_group

from pdserve.disaggregation.transfer import outgoing_pages
from pdserve.disaggregation.transfer.backends.handshake import WIRE_VERSION, Greeting, Offer, frame
from pdserve.disaggregation.transfer.backends.page_stream import BATCH
from pdserve.disaggregation.transfer.engine import TransferEngine
from pdserve.mem_cache.kv_pages.page_group import PageGroup
from pdserve.mem_cache.kv_pages.page_order import PageConverter
from pdserve.mem_cache.kv_pages.region import allocate_region
from pdserve.mem_cache.kv_pages.staging import Piece, divide
from pdserve.messages.base import pack_i32
from pdserve.messages.worker import (
    AdmitPeer,
    CancelSend,
    ConnectPeer,
    DisconnectPeer,
    GrantPages,
    KVLayout,
    PagesVerified,
    PeerAdmitted,
    PeerConnected,
    PeerLinkDown,
    RevokePages,
    SendEnded,
    SendPages,
    VerifyPages,
)
from pdserve.model_runner.device.cpu import CpuDevice
from pdserve.model_runner.kv.layout import KVShape, make_layout
from pdserve.model_runner.kv.pool import make_pool
from pdserve.model_runner.kv.staging import PoolPages, staged_groups
from pdserve.runtime.layers_done import LayersDone

LIMIT = limit(10.0)
COUNTS = (60, 20)
SLOTS = 3
SRC = [np.arange(1, 51), np.array([3, 1, 2, 9, 8])]
DST = [np.random.default_rng(1).permutation(np.arange(5, 55)), np.array([7, 9, 8, 4, 5])]
SIDES = ["PD", "P", "D"]
"""Sides that have their pool on a device: the writer P, the owner D."""


def layout_of(order="tokens", dtype=torch.bfloat16) -> KVLayout:
    return make_layout(KVShape(6, 2, 16), 8, dtype, order, windows={0: 20, 1: 20, 3: 20, 4: 20})


class Node:
    """An engine over pools of random bytes, on a device if ``staged``."""

    def __init__(self, kind: str, epoch: str, layout: KVLayout, *, staged: bool) -> None:
        self.pools, groups = [], []
        self.slabs = slabs_of(1, 3 * max(group.page_bytes for group in layout.groups) + 100)
        for group, count in zip(layout.groups, COUNTS, strict=True):
            region = allocate_region(group.page_bytes * count, shared=kind == "shm")
            pool = np.frombuffer(region.buffer, np.uint8).reshape(count, -1)
            pool[:] = np.random.default_rng(len(epoch)).integers(0, 256, pool.shape)
            self.pools.append(pool)
            staging = staged_group(pool, SLOTS, self.slabs, group)
            groups.append(staging if staged else PageGroup.of(group, region))
        self.devices = [group.staging.device for group in groups if group.staging is not None]
        self.events = queue.Queue()
        backend = CopyLibrary(epoch) if kind == "copy" else kind
        self.engine = TransferEngine(backend, groups, epoch, "127.0.0.1", self.events.put, layout=layout).start()

    def ask(self, command):
        self.engine.submit(command)
        return self.next()

    def next(self):
        return self.events.get(timeout=LIMIT)


@pytest.fixture(params=["tcp", "shm", "copy"])
def kind(request):
    return request.param


@pytest.fixture
def make_pair(kind):
    nodes = []

    def make(staged="PD", theirs=None, ours=None) -> tuple[Node, Node]:
        layouts = theirs or layout_of(), ours or layout_of()
        writer, owner = (Node(kind, e, k, staged=e in staged) for e, k in zip("PD", layouts, strict=True))
        nodes.extend((writer, owner))
        for pool in owner.pools:
            pool[:] = 0
        link(writer, owner, 1)
        return writer, owner

    yield make
    for node in nodes:
        node.engine.close()


def link(writer: Node, owner: Node, number: int) -> None:
    assert owner.ask(AdmitPeer("P", number)) == PeerAdmitted("P", number)
    assert writer.ask(ConnectPeer("D", number, owner.engine.metadata)) == PeerConnected("D", number)


def packed(pages):
    return [pack_i32(numbers) for numbers in pages]


def send(src=SRC, dst=DST, *, last=True, room=1):
    return SendPages(named(room), packed(src), packed(dst), last)


def verify(owner: Node, slices, order=None, *, checksum=True):
    owner.engine.submit(RevokePages(named(1), are_checked=True))
    return owner.ask(VerifyPages(named(1), packed(DST), slices, order, checksum)).ok


@pytest.mark.parametrize("staged", SIDES)
def test_more_pages_than_there_is_memory_for_land_and_are_checked(make_pair, staged):
    writer, owner = make_pair(staged)
    owner.engine.submit(GrantPages(named(1), "P", packed(DST)))
    writer.engine.submit(send([SRC[0][:4], SRC[1][:0]], [DST[0][:4], DST[1][:0]], last=False))
    ended = writer.ask(send([SRC[0][4:], SRC[1]], [DST[0][4:], DST[1]]))
    assert ended.error is None
    for ours, theirs, src, dst in zip(writer.pools, owner.pools, SRC, DST, strict=True):
        assert np.array_equal(theirs[dst], ours[src])
        assert not np.delete(theirs, dst, axis=0).any()
    assert verify(owner, ended.slices)
    assert held(writer.engine) == held(owner.engine) == 0
    # Of the device nothing was asked that was not moved.
    moved = [sum(map(len, pages)) for pages in ([SRC[0]], [SRC[1]])]
    for node, calls in ((writer, "reads"), (owner, "writes")):
        for device, pages, pool in zip(node.devices, moved, node.pools, strict=False):
            assert sum(getattr(device, calls)) == pages * pool.shape[1]


def swapped(slices):
    """Swap the places of the first two slices of group 0."""
    one, other = [piece for piece in slices if piece.group == 0 and piece.count == SLOTS][:2]
    moved = {one.first: other.first, other.first: one.first}
    kept = [piece for piece in slices if piece not in (one, other)]
    return kept + [msgspec.structs.replace(piece, first=moved[piece.first]) for piece in (one, other)]


DAMAGES = {
    "a checksum": lambda slices: [msgspec.structs.replace(slices[0], checksum=slices[0].checksum ^ 1), *slices[1:]],
    "a slice that is missing": lambda slices: slices[1:],
    "two that are swapped": swapped,
}


@pytest.mark.parametrize("kind", ["tcp"], indirect=True)
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_not_as_it_was_sent_is_reported(make_pair, damage):
    writer, owner = make_pair()
    owner.engine.submit(GrantPages(named(1), "P", packed(DST)))
    ended = writer.ask(send())
    assert not verify(owner, DAMAGES[damage](ended.slices))


@pytest.mark.parametrize("kind", ["tcp"], indirect=True)
def test_pages_that_were_written_twice_are_not_trusted(make_pair):
    writer, owner = make_pair()
    owner.engine.submit(GrantPages(named(1), "P", packed(DST)))
    again = [pages[:1] for pages in DST]
    writer.engine.submit(send(last=False))
    ended = writer.ask(send([pages[-1:] for pages in SRC], again))
    assert ended.error is None
    # Those of the first time, which are all of the pages.
    slices = [piece for piece in ended.slices if piece.first + piece.count <= len(DST[piece.group])]
    assert sum(piece.count for piece in slices) == sum(map(len, DST))
    assert not verify(owner, slices)


@pytest.mark.parametrize("kind", ["tcp"], indirect=True)
def test_without_checksums_nothing_is_hashed(make_pair):
    writer, owner = make_pair()
    owner.engine.submit(GrantPages(named(1), "P", packed(DST), checksum=False))
    ended = writer.ask(msgspec.structs.replace(send(), checksum=False))
    assert {piece.checksum for piece in ended.slices} == {0}
    assert verify(owner, ended.slices, checksum=False)


@pytest.mark.parametrize("kind", ["tcp"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("order", ["tokens", "blocks"])
@pytest.mark.parametrize("ahead", [False, True])
def test_pages_of_another_order_become_ours_on_the_way(make_pair, order, dtype, ahead, monkeypatch):
    theirs, ours = layout_of(order, dtype), layout_of("tokens" if order == "blocks" else "blocks", dtype)
    monkeypatch.setattr(outgoing_pages, "MIN_AHEAD_BYTES", 1)
    writer, owner = make_pair("PD", theirs, ours)
    owner.engine.submit(GrantPages(named(1), "P", packed(DST), order))
    done = LayersDone()
    done.advance(3 if ahead else 6)  # of the model's six: some pages go in two parts
    writer.engine.push(send(), done)
    if ahead:
        wait_until(lambda: owner.devices[1].writes, LIMIT, "the first layers are there")
        done.finish()
        writer.engine.wake()
    ended = writer.next()
    assert ended.error is None
    assert len({(piece.begin, piece.end) for piece in ended.slices if piece.group == 0}) == 1 + ahead
    for group, (src, dst) in enumerate(zip(SRC, DST, strict=True)):
        converter = PageConverter(ours, order, group)
        for page, landed in zip(writer.pools[group][src].copy(), owner.pools[group][dst], strict=True):
            converter.convert(page)
            assert np.array_equal(page, landed)
    assert verify(owner, ended.slices, order)


def test_a_link_that_goes_down_in_the_middle_leaves_nothing_behind(make_pair):
    writer, owner = make_pair()
    device = owner.devices[0]
    device.gate = threading.Event()
    owner.engine.submit(GrantPages(named(1), "P", packed(DST)))
    writer.engine.submit(send())
    assert device.reached.wait(LIMIT)
    owner.engine.submit(DisconnectPeer("P", 1))
    device.gate.set()
    device.gate = None
    assert owner.next() == PeerLinkDown("P", 1)
    landed = [pool.copy() for pool in owner.pools]
    events = [writer.next(), writer.next()]
    assert events[0] == PeerLinkDown("D", 1)
    assert isinstance(events[1], SendEnded)
    assert events[1].error is not None
    assert held(writer.engine) == held(owner.engine) == 0
    owner.engine.submit(RevokePages(named(1)))
    link(writer, owner, 2)
    assert not owner.engine._received._landed
    assert all(np.array_equal(before, after) for before, after in zip(landed, owner.pools, strict=True))
    owner.engine.submit(GrantPages(named(1), "P", packed(DST)))
    ended = writer.ask(send())
    assert ended.error is None
    assert verify(owner, ended.slices)


def test_a_send_that_is_cancelled_gives_its_slots_back_when_nothing_reads_them(make_pair):
    writer, owner = make_pair()
    device = owner.devices[0]
    device.gate = threading.Event()
    owner.engine.submit(GrantPages(named(1), "P", packed(DST)))
    writer.engine.submit(send())
    assert device.reached.wait(LIMIT)
    writer.engine.submit(CancelSend(named(1)))
    device.gate.set()
    ended = writer.next()
    assert ended.cancelled
    assert held(writer.engine) == held(owner.engine) == 0
    assert 0 < sum(device.writes) < len(SRC[0]) * owner.pools[0].shape[1]


class Crowd:
    """D has one slab, which Q uses; one of its two pages (2 and 3) has come. P waits for the slab."""

    def __init__(self, kind: str) -> None:
        layout = layout_of()
        self.owner, self.writer = Node(kind, "D", layout, staged=True), Node(kind, "P", layout, staged=True)
        self.page = self.owner.pools[0].shape[1]
        offer = msgspec.msgpack.decode(self.owner.engine.metadata, type=Offer)
        if kind == "tcp":
            self.q = socket.create_connection((offer.place, offer.port), LIMIT)
        else:
            self.q = socket.socket(socket.AF_UNIX)
            self.q.connect(f"\0{offer.place}")
        self.owner.engine.submit(GrantPages(named(9), "Q", packed([np.array([2, 3, 4]), np.array([], np.int32)])))
        self.q.sendall(frame(Greeting(WIRE_VERSION, "Q", "D", offer.secret)))
        self.q.sendall(self.batch(0, 2, 3)[: -self.page])
        wait_until(lambda: self.owner.slabs.free == 0, LIMIT, "Q has the slab")
        link(self.writer, self.owner, 1)
        self.owner.engine.submit(GrantPages(named(1), "P", packed(DST)))
        self.writer.engine.submit(send())
        wait_until(lambda: self.owner.engine._backend._receive_buffers.line, LIMIT, "P stands in line")
        assert not self.owner.devices[0].writes

    def batch(self, number: int, *pages: int) -> bytes:
        header = BATCH.pack(number, 9, 1, 0, 0, 2, len(pages))
        return header + np.array(pages, "<i4").tobytes() + bytes(len(pages) * self.page)

    def assert_all_lands(self) -> None:
        ended = self.writer.next()
        assert isinstance(ended, SendEnded)
        assert ended.error is None
        assert verify(self.owner, ended.slices)
        assert held(self.writer.engine) == held(self.owner.engine) == 0

    def close(self) -> None:
        self.q.close()
        self.owner.engine.close()
        self.writer.engine.close()


@pytest.fixture(params=["tcp", "shm"])
def crowd(request):
    crowd = Crowd(request.param)
    yield crowd
    crowd.close()


@pytest.mark.parametrize("how", ["it ends", "it is put out"])
def test_who_waits_for_a_slab_gets_that_of_a_writer_that_has_gone(crowd, how):
    if how == "it ends":
        crowd.q.close()
    else:
        crowd.owner.engine.submit(RevokePages(named(9)))
    assert isinstance(crowd.owner.next(), PeerLinkDown)
    crowd.assert_all_lands()


def test_who_waits_for_a_slab_gets_it_before_who_had_it_last(crowd):
    crowd.q.sendall(bytes(crowd.page) + crowd.batch(1, 4))
    crowd.assert_all_lands()
    wait_until(lambda: crowd.page in crowd.owner.devices[0].writes, LIMIT, "so has the last of Q")
    assert crowd.owner.devices[0].writes[:2] == [2 * crowd.page, SLOTS * crowd.page]


def test_the_memory_is_divided_so_that_every_group_can_move():
    assert divide(64 << 20, [1 << 20]) == ((32,), 4 << 20, 8)
    assert divide(64 << 20, [1 << 20, 2 << 20]) == ((16, 8), 4 << 20, 8)
    assert divide(64 << 20, [40 << 20]) == ((1,), 40 << 20, 1)
    assert divide(1, [1000, 10]) == ((1, 1), 1000, 1)
    for nbytes in (10_000, 1 << 20, 300 << 20):
        sizes = divide(nbytes, [1000])
        assert sizes.slots[0] * 1000 + sizes.slab_bytes * sizes.slabs <= nbytes


@pytest.mark.parametrize("make", [CpuDevice, RecordingDevice], ids=["cpu", "recording"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_a_pool_of_any_type_is_bytes(make, dtype):
    device, layout = make(), layout_of(dtype=dtype)
    pools = [make_pool(layout, count, device.torch, group=group) for group, count in enumerate(COUNTS)]
    groups = staged_groups(layout, pools, device, 0.0005)
    for kept, pool, group in zip(layout.groups, pools, groups, strict=True):
        assert group is not None
        assert group.staging is not None
        assert (group.num_pages, group.page_bytes, group.layers) == (len(pool.data), kept.page_bytes, kept.layers)
        pages = group.staging.device
        assert isinstance(pages, PoolPages)
        memory = group.region.view()[: kept.page_bytes]
        memory[:] = np.random.default_rng(0).integers(0, 256, kept.page_bytes, dtype=np.uint8).data
        pages.write([Piece(3 * kept.page_bytes, memory)])
        there = pool.data.view(torch.uint8).reshape(len(pool.data), -1)
        assert there[3].numpy().tobytes() == bytes(memory)
        assert not there[:3].any()
        assert not there[4:].any()
        again = group.region.view()[kept.page_bytes : 2 * kept.page_bytes]
        pages.read([Piece(3 * kept.page_bytes, again)])
        assert again == memory


def test_the_answer_of_a_check_is_no_when_nothing_passed(kind):
    owner = Node(kind, "D", layout_of(), staged=True)
    try:
        assert owner.ask(VerifyPages(named(1), packed(DST), [])) == PagesVerified(named(1), ok=False)
    finally:
        owner.engine.close()
