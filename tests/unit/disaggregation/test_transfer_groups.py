"""Hand-overs of pages of several groups, of unlike sizes and layers, by one engine to another over real sockets."""

from __future__ import annotations

import queue

import msgspec
import numpy as np
import pytest
from support import fake_cuda_driver
from support.handovers import named
from support.machine import limit
from support.processes import wait_until
from support.staged_pools import pool_group

from pdserve.disaggregation.transfer import outgoing_pages
from pdserve.disaggregation.transfer.engine import TransferEngine
from pdserve.mem_cache.kv_pages.page_order import PageConverter
from pdserve.mem_cache.kv_pages.region import allocate_region
from pdserve.messages.base import pack_i32
from pdserve.messages.worker import (
    AdmitPeer,
    ConnectPeer,
    GrantPages,
    KVGroup,
    KVLayout,
    PagesVerified,
    PeerAdmitted,
    PeerConnected,
    RevokePages,
    SendEnded,
    SendPages,
    VerifyPages,
)
from pdserve.runtime.layers_done import LayersDone

LIMIT = limit(10.0)
KEPT, WINDOWED = (2, 5), (0, 1, 3, 4)
"""Layers of the model, by group."""
SIZE, DIM = 8, 16
LAYER_BYTES = 2 * SIZE * DIM * 2
COUNTS = (40, 20)


def make_layout(kept=KEPT, order="tokens") -> KVLayout:
    windowed = tuple(layer for layer in range(6) if layer not in kept)
    groups = [KVGroup(n, "mha", 1, DIM, "bfloat16", len(n) * LAYER_BYTES) for n in (kept, windowed)]
    return KVLayout(SIZE, (groups[0], msgspec.structs.replace(groups[1], window=20)), order)


class Node:
    """An engine over a pool of random bytes for each group that has any."""

    def __init__(self, kind: str, epoch: str, layout: KVLayout) -> None:
        self.pools, groups = [], []
        for group, count in zip(layout.groups, COUNTS, strict=True):
            nbytes = group.page_bytes * count
            region = allocate_region(nbytes, shared=kind == "shm") if nbytes else None
            pool = np.frombuffer(region.buffer, np.uint8) if region is not None else np.empty(0, np.uint8)
            self.pools.append(pool.reshape(count, -1))
            groups.append(None if region is None else pool_group(kind, region, group.page_bytes, kept=group))
            self.pools[-1][:] = np.random.default_rng(len(epoch)).integers(0, 256, self.pools[-1].shape)
        self.events = queue.Queue()
        self.engine = TransferEngine(kind, groups, epoch, "127.0.0.1", self.events.put, layout=layout).start()

    def ask(self, command):
        self.engine.submit(command)
        return self.next()

    def next(self):
        return self.events.get(timeout=LIMIT)


@pytest.fixture(params=["tcp", "shm", "cuda_ipc"])
def kind(request):
    return request.param


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    """Install a CUDA driver without a GPU."""
    fake_cuda_driver.install(monkeypatch)


@pytest.fixture
def make_pair(kind):
    nodes = []

    def make(ours: KVLayout, theirs: KVLayout) -> tuple[Node, Node]:
        writer, owner = Node(kind, "P", ours), Node(kind, "D", theirs)
        nodes.extend((writer, owner))
        for pool in owner.pools:
            pool[:] = 0
        assert owner.ask(AdmitPeer("P", 1)) == PeerAdmitted("P", 1)
        assert writer.ask(ConnectPeer("D", 1, owner.engine.metadata)) == PeerConnected("D", 1)
        return writer, owner

    yield make
    for node in nodes:
        node.engine.close()


SRC = [np.arange(1, 31), np.array([3, 1, 2])]
DST = [np.arange(5, 35), np.array([7, 9, 8])]


def packed(pages):
    return [pack_i32(numbers) for numbers in pages]


def send(src=SRC, dst=DST, *, last=True):
    return SendPages(named(1), packed(src), packed(dst), last)


def test_each_group_lands_in_its_own_pool_and_is_checked_there(make_pair):
    writer, owner = make_pair(make_layout(), make_layout())
    owner.engine.submit(GrantPages(named(1), "P", packed(DST)))
    first, rest = [SRC[0][:4], SRC[1][:0]], [SRC[0][4:], SRC[1]]
    writer.engine.submit(send(first, [DST[0][:4], DST[1][:0]], last=False))
    ended = writer.ask(send(rest, [DST[0][4:], DST[1]]))
    assert isinstance(ended, SendEnded)
    assert (ended.error, ended.nbytes) == (None, (30 * len(KEPT) + 3 * len(WINDOWED)) * LAYER_BYTES)
    for ours, theirs, src, dst in zip(writer.pools, owner.pools, SRC, DST, strict=True):
        assert np.array_equal(theirs[dst], ours[src])
        assert not np.delete(theirs, dst, axis=0).any()
    slices = ended.slices
    assert sorted({piece.group for piece in slices}) == [0, 1]
    swapped = [msgspec.structs.replace(piece, group=1 - piece.group) for piece in slices]
    unknown = [*slices[:-1], msgspec.structs.replace(slices[-1], group=2)]
    without = [piece for piece in slices if piece.group == 0]
    for checked, ok in ((slices, True), (slices[::-1], True), (swapped, False), (unknown, False), (without, False)):
        assert owner.ask(VerifyPages(named(1), packed(DST), checked)) == PagesVerified(named(1), ok)
    groups = "landed pages of 1 groups where there are 2"
    assert owner.ask(VerifyPages(named(1), packed(DST[:1]), slices)) == PagesVerified(named(1), ok=False, error=groups)
    owner.pools[1][8, -1] ^= 1
    assert owner.ask(VerifyPages(named(1), packed(DST), slices)) == PagesVerified(named(1), ok=False)


def test_a_group_whose_layers_are_computed_sooner_leaves_sooner(make_pair, monkeypatch):
    monkeypatch.setattr(outgoing_pages, "MIN_AHEAD_BYTES", 1)
    writer, owner = make_pair(make_layout(), make_layout())
    owner.engine.submit(GrantPages(named(1), "P", packed(DST)))
    done = LayersDone()
    done.advance(2)  # of the model's: the first two of the windowed group, none of the other
    writer.engine.push(send(), done)
    (kept, windowed), (_, ours) = owner.pools, writer.pools
    half = 2 * LAYER_BYTES
    wait_until(lambda: (windowed[DST[1], :half] == ours[SRC[1], :half]).all(), LIMIT, "two layers land")
    assert not windowed[:, half:].any()
    assert not kept.any()
    done.advance(5)
    writer.engine.wake()
    wait_until(lambda: (windowed[DST[1]] == ours[SRC[1]]).all(), LIMIT, "the windowed group is there")
    wait_until(lambda: (kept[DST[0], :LAYER_BYTES] == writer.pools[0][SRC[0], :LAYER_BYTES]).all(), LIMIT, "a layer")
    assert not kept[:, LAYER_BYTES:].any()
    done.finish()
    writer.engine.wake()
    slices = writer.next().slices
    assert owner.ask(VerifyPages(named(1), packed(DST), slices)) == PagesVerified(named(1), ok=True)


def test_pages_of_another_order_become_ours_group_by_group(make_pair):
    ours = make_layout(order="blocks")
    writer, owner = make_pair(make_layout(), ours)
    owner.engine.submit(GrantPages(named(1), "P", packed(DST)))
    ended = writer.ask(send())
    expected = [pool.copy() for pool in owner.pools]
    for group, pages in enumerate(DST):
        for page in pages:
            PageConverter(ours, "tokens", group).convert(expected[group][page])
    assert not np.array_equal(expected[1], owner.pools[1])
    assert owner.ask(VerifyPages(named(1), packed(DST), ended.slices, "tokens")) == PagesVerified(named(1), ok=True)
    assert all(np.array_equal(pool, right) for pool, right in zip(owner.pools, expected, strict=True))


def test_a_model_whose_layers_all_have_windows_moves_their_pages_alone(make_pair):
    layout = make_layout(kept=())
    writer, owner = make_pair(layout, layout)
    owner.engine.submit(GrantPages(named(1), "P", packed(DST)))
    ended = writer.ask(send())
    assert (ended.error, ended.nbytes) == (None, 3 * 6 * LAYER_BYTES)
    assert np.array_equal(owner.pools[1][DST[1]], writer.pools[1][SRC[1]])
    assert {piece.group for piece in ended.slices} == {1}
    assert owner.ask(VerifyPages(named(1), packed(DST), ended.slices)) == PagesVerified(named(1), ok=True)


@pytest.mark.parametrize("kind", ["tcp"], indirect=True)
def test_what_was_granted_of_one_group_may_not_be_written_of_another(make_pair):
    writer, owner = make_pair(make_layout(), make_layout())
    both = [DST[0], np.arange(5, 8)]
    owner.engine.submit(GrantPages(named(1), "P", packed([DST[0], DST[1][:0]])))
    writer.engine.submit(send(dst=both))
    kept, windowed = owner.pools
    wait_until(lambda: (kept[DST[0]] == writer.pools[0][SRC[0]]).all(), LIMIT, "what was granted lands")
    # An answer of either engine: both have looked at all that there is to do.
    assert owner.ask(VerifyPages(named(9), [b"", b""], [])).ok
    assert not windowed.any()
    assert writer.events.empty()
    owner.engine.submit(GrantPages(named(1), "P", packed([DST[0][:0], both[1]])))
    assert writer.next().error is None
    assert np.array_equal(windowed[both[1]], writer.pools[1][SRC[1]])
    owner.engine.submit(RevokePages(named(1)))


@pytest.mark.parametrize(
    ("src", "dst"),
    [(SRC[:1], DST[:1]), (SRC, DST[:1]), (SRC, [DST[0], DST[1][:2]]), ([SRC[0], np.array([3, 1, 20])], DST)],
    ids=["one group", "one there", "unlike counts", "none of the pool's"],
)
def test_pages_that_fit_no_group_are_not_sent(make_pair, src, dst):
    writer, owner = make_pair(make_layout(), make_layout())
    assert writer.ask(send(src, dst)).error
    assert not any(pool.any() for pool in owner.pools)
