"""Pools on a device that a backend reaches by address: what NIXL is told of them, and what the host sees of them."""

from __future__ import annotations

import os
import queue
import sys

import msgspec
import numpy as np
import pytest
import torch
from support.copy_library import CopyLibrary
from support.fake_nixl import install
from support.handovers import named
from support.machine import limit
from support.processes import wait_until
from support.recording_device import RecordingDevice
from support.staged_pools import direct_group, held, slabs_of, staged_group

from pdserve.disaggregation.transfer import outgoing_pages
from pdserve.disaggregation.transfer.backends.load import make_backend
from pdserve.disaggregation.transfer.engine import TransferEngine
from pdserve.mem_cache.kv_pages.page_group import PageGroup
from pdserve.mem_cache.kv_pages.page_order import PageConverter
from pdserve.mem_cache.kv_pages.region import RegionError, allocate_region
from pdserve.mem_cache.kv_pages.word_sum import host_checksum
from pdserve.messages.base import pack_i32
from pdserve.messages.worker import (
    AdmitPeer,
    ConnectPeer,
    GrantPages,
    KVLayout,
    PeerAdmitted,
    PeerConnected,
    RevokePages,
    SendPages,
    VerifyPages,
)
from pdserve.model_runner.kv.layout import KVShape, make_layout
from pdserve.model_runner.kv.pool import make_pool
from pdserve.model_runner.kv.staging import direct_groups
from pdserve.runtime import layers_done
from pdserve.runtime.layers_done import LayersDone

LIMIT = limit(10.0)
COUNTS = (60, 20)
SRC = [np.arange(1, 51), np.array([3, 1, 2, 9, 8])]
DST = [np.random.default_rng(1).permutation(np.arange(5, 55)), np.array([7, 9, 8, 4, 5])]
KINDS = {"host": "DRAM", "staged": "DRAM", "direct": "VRAM"}
"""How a side has its pool, and what its end of a write is called; what is staged comes and goes by the host."""
ORDINAL = {"P": 3, "D": 1}


@pytest.fixture
def agents(monkeypatch):
    yield install(monkeypatch)
    sys.modules.pop("pdserve.disaggregation.transfer.backends.nixl", None)


def layout_of(order="tokens") -> KVLayout:
    return make_layout(KVShape(6, 2, 16), 8, torch.bfloat16, order, windows={0: 20, 1: 20, 3: 20, 4: 20})


class Node:
    """An engine over pools of random bytes."""

    def __init__(self, epoch: str, how: str, layout: KVLayout) -> None:
        self.pools, groups = [], []
        slabs = slabs_of(1, 3 * max(group.page_bytes for group in layout.groups) + 100)
        for group, count in zip(layout.groups, COUNTS, strict=True):
            region = allocate_region(group.page_bytes * count, shared=False)
            pool = np.frombuffer(region.buffer, np.uint8).reshape(count, -1)
            pool[:] = np.random.default_rng(len(how)).integers(0, 256, pool.shape)
            self.pools.append(pool)
            if how == "host":
                groups.append(PageGroup.of(group, region))
            elif how == "staged":
                groups.append(staged_group(pool, 3, slabs, group))
            else:
                # A window that no number of pages fits into.
                groups.append(direct_group(pool, group, ORDINAL[epoch], window=group.page_bytes // 3))
        self.devices = [group.direct.device for group in groups if group.direct is not None]
        self.events: queue.Queue = queue.Queue()
        self.engine = TransferEngine("nixl", groups, epoch, "127.0.0.1", self.events.put, layout=layout).start()

    def ask(self, command):
        self.engine.submit(command)
        return self.events.get(timeout=LIMIT)


@pytest.fixture
def make_pair(agents):
    nodes = []

    def make(theirs: str, ours: str, orders=("tokens", "tokens")) -> tuple[Node, Node]:
        writer, owner = Node("P", theirs, layout_of(orders[0])), Node("D", ours, layout_of(orders[1]))
        nodes.extend((writer, owner))
        for pool in owner.pools:
            pool[:] = 0
        assert owner.ask(AdmitPeer("P", 1)) == PeerAdmitted("P", 1)
        assert writer.ask(ConnectPeer("D", 1, owner.engine.metadata)) == PeerConnected("D", 1)
        return writer, owner

    yield make
    for node in nodes:
        node.engine.close()


def packed(pages):
    return [pack_i32(numbers) for numbers in pages]


def verified(owner: Node, slices, order=None, *, checksum=True) -> bool:
    owner.engine.submit(RevokePages(named(1), are_checked=True))
    return owner.ask(VerifyPages(named(1), packed(DST), slices, order, checksum)).ok


@pytest.mark.parametrize("ours", KINDS)
@pytest.mark.parametrize("theirs", KINDS)
def test_each_side_is_what_it_is_and_what_lands_is_checked(make_pair, agents, theirs, ours):
    writer, owner = make_pair(theirs, ours)
    owner.engine.submit(GrantPages(named(1), "P", packed(DST)))
    ended = writer.ask(SendPages(named(1), packed(SRC), packed(DST), True))
    assert ended.error is None
    for mine, landed, src, dst in zip(writer.pools, owner.pools, SRC, DST, strict=True):
        assert np.array_equal(landed[dst], mine[src])
        assert not np.delete(landed[1:], dst - 1, axis=0).any()  # page 0 is where the first contact goes
    assert agents.kinds == {(KINDS[theirs], KINDS[ours])}
    assert verified(owner, ended.slices)
    wrong = msgspec.structs.replace(ended.slices[0], checksum=ended.slices[0].checksum ^ 1)
    if ours != "staged":  # which has told by now, and forgotten
        assert not verified(owner, [wrong, *ended.slices[1:]])
    assert held(writer.engine) == held(owner.engine) == 0
    for agent in agents.agents.values():
        device = ORDINAL["P" if agent.name.startswith("P") else "D"]
        assert {(found, kind) for _, _, found, kind in agent.registered} <= {(device, "VRAM"), (0, "DRAM")}
    assert os.environ["UCX_TLS"] == ("tcp,cuda_copy" if "direct" in (theirs, ours) else "tcp")


@pytest.mark.parametrize("ours", KINDS)
@pytest.mark.parametrize("theirs", KINDS)
def test_from_device_to_device_the_host_sees_no_page_and_else_it_hashes(make_pair, monkeypatch, theirs, ours):
    monkeypatch.setattr(outgoing_pages, "MAX_SLICE_PAGES", 2)
    writer, owner = make_pair(theirs, ours)
    owner.engine.submit(GrantPages(named(1), "P", packed(DST)))
    ended = writer.ask(SendPages(named(1), packed(SRC), packed(DST), True))
    assert verified(owner, ended.slices)
    is_direct = theirs == ours == "direct"
    assert {piece.algorithm for piece in ended.slices} == {"words" if is_direct else "xxh3"}
    for node in (writer, owner):
        for device, pages in zip(node.devices, SRC, strict=bool(node.devices)):
            assert device.sums == ([len(pages)] if is_direct else []), "the host waits once for all slices"
            assert bool(device.reads) != is_direct


@pytest.mark.parametrize("has_sums", [(True, True), (True, False), (False, True)], ids=str)
def test_a_damaged_page_is_noticed_where_it_lies(make_pair, has_sums):
    """``has_sums``: of the writer's device and the owner's. The host adds up what the device can't."""
    writer, owner = make_pair("direct", "direct")
    for node, has in zip((writer, owner), has_sums, strict=True):
        for device in node.devices:
            device.has_sums = has
    ended = writer.ask(SendPages(named(1), packed(SRC), packed(DST), True))
    assert {piece.algorithm for piece in ended.slices} == {"words" if has_sums[0] else "xxh3"}
    assert verified(owner, ended.slices)
    owner.pools[1][DST[1][2], -1] ^= 1
    assert not verified(owner, ended.slices)
    owner.pools[1][DST[1][2], -1] ^= 1
    assert verified(owner, ended.slices)
    owner.pools[0][DST[0][[0, 1]]] = owner.pools[0][DST[0][[1, 0]]]
    assert not verified(owner, ended.slices)


def test_a_host_refuses_sums_that_are_meant_for_devices(make_pair):
    """It would take ten times as long for them as for xxh3."""
    writer, owner = make_pair("direct", "host")
    ended = writer.ask(SendPages(named(1), packed(SRC), packed(DST), True))
    piece = ended.slices[0]
    pages = owner.pools[piece.group][DST[piece.group][piece.first : piece.first + piece.count]]
    words = msgspec.structs.replace(piece, algorithm="words", checksum=host_checksum(pages.reshape(-1)))
    assert verified(owner, ended.slices)
    assert not verified(owner, [words, *ended.slices[1:]])


def test_without_checksums_the_host_looks_at_nothing(make_pair):
    writer, owner = make_pair("direct", "direct")
    owner.engine.submit(GrantPages(named(1), "P", packed(DST), checksum=False))
    ended = writer.ask(SendPages(named(1), packed(SRC), packed(DST), True, checksum=False))
    assert verified(owner, ended.slices, checksum=False)
    assert not any(device.reads or device.writes or device.sums for node in (writer, owner) for device in node.devices)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("order", ["tokens", "blocks"])
def test_pages_of_another_order_become_ours_where_they_lie(make_pair, order, ahead, monkeypatch):
    ours = "tokens" if order == "blocks" else "blocks"
    monkeypatch.setattr(outgoing_pages, "MIN_AHEAD_BYTES", 1)
    writer, owner = make_pair("direct", "direct", (order, ours))
    done = LayersDone()
    done.advance(3 if ahead else 6)
    writer.engine.push(SendPages(named(1), packed(SRC), packed(DST), True), done)
    done.finish()
    writer.engine.wake()
    ended = writer.events.get(timeout=LIMIT)
    assert ended.error is None
    assert verified(owner, ended.slices, order)
    for group, (src, dst) in enumerate(zip(SRC, DST, strict=True)):
        converter = PageConverter(layout_of(ours), order, group)
        for page, landed in zip(writer.pools[group][src].copy(), owner.pools[group][dst], strict=True):
            converter.convert(page)
            assert np.array_equal(page, landed)


class DeviceEvent:
    """An event that comes when the test says so. ``looks``: how often it was asked for."""

    def __init__(self) -> None:
        self.has_come = False
        self.looks = 0

    def look(self) -> bool:
        self.looks += 1
        return self.has_come


@pytest.mark.parametrize("kind", ["direct", "staged"])
def test_layers_leave_a_device_after_their_events(make_pair, monkeypatch, kind):
    """The writer's pool gets each two layers when the engine has looked for their event in vain."""
    monkeypatch.setattr(outgoing_pages, "MIN_AHEAD_BYTES", 1)
    monkeypatch.setattr(layers_done, "MARKED_LAYERS", 2)
    writer, owner = make_pair(kind, kind)
    owner.engine.submit(GrantPages(named(1), "P", packed(DST)))
    events = [DeviceEvent() for _ in range(3)]
    marks = iter(events)
    done = LayersDone()
    done.mark = lambda: next(marks).look
    for count in range(1, 7):
        done.launched(count)
    computed = [pool.copy() for pool in writer.pools]
    for pool in writer.pools:
        pool[:] = 255
    writer.engine.push(SendPages(named(1), packed(SRC), packed(DST), True), done)
    for number, event in enumerate(events):
        wait_until(lambda event=event: event.looks > 0, LIMIT, "the engine looks for the event", every=0.001)
        for group, pool, whole in zip(layout_of().groups, writer.pools, computed, strict=True):
            for part, layer in enumerate(group.layers):
                if layer // 2 == number:
                    size = group.page_bytes // group.num_layers
                    pool[:, part * size : (part + 1) * size] = whole[:, part * size : (part + 1) * size]
        event.has_come = True
    ended = writer.events.get(timeout=LIMIT)
    assert ended.error is None
    assert min((piece.begin, piece.end) for piece in ended.slices if piece.group == 1) == (0, 2)
    for landed, whole, src, dst in zip(owner.pools, computed, SRC, DST, strict=True):
        assert np.array_equal(landed[dst], whole[src])
    assert verified(owner, ended.slices)


@pytest.mark.parametrize("kind", ["tcp", "shm", "copy"])
def test_other_backends_refuse_such_pools(kind):
    backend = CopyLibrary("D") if kind == "copy" else make_backend(kind, "D", "127.0.0.1")
    with pytest.raises(RegionError, match=f"the {kind} backend does not reach the memory of a GPU.*nixl"):
        backend.register([direct_group(np.zeros((4, 64), np.uint8))])
    backend.close()


def test_a_pool_of_torch_is_where_it_is_now():
    device, layout = RecordingDevice(), layout_of()
    pools = [make_pool(layout, count, device.torch, group=group) for group, count in enumerate(COUNTS)]
    for kept, pool, group in zip(layout.groups, pools, direct_groups(layout, pools, device), strict=True):
        assert group is not None
        assert group.direct is not None
        assert (group.num_pages, group.num_sources, group.layers) == (*[len(pool.data)] * 2, kept.layers)
        assert group.region.address == pool.data.data_ptr()
        # As memory is given back and taken again.
        pool.data.untyped_storage().resize_(0)
        hole = torch.zeros(pool.data.numel() * 2)
        pool.data.untyped_storage().resize_(pool.data.nbytes)
        assert group.region.address == pool.data.data_ptr()
        del hole
        pool.data.view(torch.uint8).copy_(torch.randint(0, 256, pool.data.view(torch.uint8).shape, dtype=torch.uint8))
        spans = [(3 * kept.page_bytes + 5, 2 * kept.page_bytes), (7, 9)]
        seen = b"".join(map(bytes, group.direct.look(spans)))
        there = pool.data.view(-1).view(torch.uint8).numpy().tobytes()
        assert seen == b"".join(there[at : at + length] for at, length in spans)
        with pytest.raises(RegionError):
            group.region.view()
