"""The transfer engine: rooms, checksums, fairness, cancelling, failures; two engines in one process."""

from __future__ import annotations

import contextlib
import queue
import threading

import msgspec
import numpy as np
import pytest
from support import fake_cuda_driver
from support.handovers import named
from support.layouts import uniform_layout
from support.machine import limit
from support.processes import wait_until
from support.slices import assert_summed_up, summed_up
from support.staged_pools import pool_group

from pdserve.disaggregation.errors import NotConnected
from pdserve.disaggregation.transfer import engine, outgoing_pages
from pdserve.disaggregation.transfer.backends.base import (
    Capabilities,
    Completion,
    LinkDown,
    LinkUp,
    TransferBackend,
    WriteHandle,
    WriteState,
)
from pdserve.disaggregation.transfer.backends.load import make_backend
from pdserve.disaggregation.transfer.engine import TransferEngine
from pdserve.disaggregation.transfer.page_check import covers
from pdserve.mem_cache.kv_pages.page_group import PageGroup
from pdserve.mem_cache.kv_pages.page_order import PageConverter
from pdserve.mem_cache.kv_pages.region import allocate_region
from pdserve.messages.base import pack_i32
from pdserve.messages.worker import (
    AdmitPeer,
    CancelSend,
    ConnectPeer,
    DisconnectPeer,
    GrantPages,
    PagesVerified,
    PeerAdmitted,
    PeerConnected,
    PeerFailed,
    PeerLinkDown,
    SendEnded,
    SendPages,
    SliceChecksum,
    VerifyPages,
)
from pdserve.runtime.layers_done import LayersDone

PAGE = 1024
PAGES = 400
LIMIT = limit(10.0)


class Node:
    """An engine over a pool of random bytes. Whom it sends pages to, of ``others``, has granted them."""

    def __init__(self, backend, epoch, others, *, page=PAGE, pages=PAGES, layout=None):
        self.others = others
        self.region = allocate_region(page * pages, shared=backend == "shm")
        self.pool = np.frombuffer(self.region.buffer, dtype=np.uint8).reshape(pages, page)
        self.pool[:] = np.random.default_rng(len(epoch)).integers(0, 256, self.pool.shape)
        self.events = queue.Queue()
        groups = [pool_group(backend, self.region, page, 1 if layout is None else layout.groups[0].num_layers)]
        made = TransferEngine(backend, groups, epoch, "127.0.0.1", self.events.put, layout=layout)
        self.engine = made.start()
        self.epoch = epoch
        self.layers = 1 if layout is None else layout.groups[0].num_layers
        self.algorithm = "words" if backend == "cuda_ipc" else "xxh3"

    def submit(self, *commands):
        for command in commands:
            if isinstance(command, SendPages) and command.handover.epoch in self.others:
                owner = self.others[command.handover.epoch]
                owner.engine.submit(GrantPages(command.handover, self.epoch, command.dst_pages))
            self.engine.submit(command)

    def next(self):
        return self.events.get(timeout=LIMIT)


def send(room, src, dst, *, last=True, peer="D"):
    return SendPages(named(room, epoch=peer), [pack_i32(src)], [pack_i32(dst)], last)


def summed(node, pages, *bounds):
    """Return the checksums that ``node`` reports of pages that it has written: its GPU's, if it has one."""
    return summed_up(node.pool, pages, *bounds, num_layers=node.layers, algorithm=node.algorithm)


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    """Of which there are none here."""
    fake_cuda_driver.install(monkeypatch)


@pytest.fixture
def make_node():
    nodes = {}

    def make(backend, epoch, **kwargs):
        nodes[epoch] = Node(backend, epoch, nodes, **kwargs)
        return nodes[epoch]

    yield make
    for node in nodes.values():
        node.engine.close()


@pytest.fixture(params=["tcp", "shm", "cuda_ipc"])
def kind(request):
    return request.param


@pytest.fixture
def pair(make_node, kind):
    writer, receiver = make_node(kind, "P"), make_node(kind, "D")
    receiver.submit(AdmitPeer("P", 1))
    assert receiver.next() == PeerAdmitted("P", 1)
    writer.submit(ConnectPeer("D", 1, receiver.engine.metadata))
    assert writer.next() == PeerConnected("D", 1)
    return writer, receiver


def test_pages_of_all_chunks_land_and_the_checksum_verifies(pair):
    writer, receiver = pair
    rng = np.random.default_rng(3)
    src, dst = rng.permutation(np.arange(1, PAGES))[:300], rng.permutation(np.arange(1, PAGES))[:300]
    untouched = np.setdiff1d(np.arange(PAGES), dst)
    before = receiver.pool[untouched].copy()
    writer.submit(*(send(5, src[a:b], dst[a:b], last=b == 300) for a, b in ((0, 1), (1, 200), (200, 300))))
    ended = writer.next()
    times = {"seconds": ended.seconds, "began": ended.began, "ended": ended.ended}
    assert ended == SendEnded(named(5), summed(writer, src, 0, 1, 200, 300), 300 * PAGE, **times)
    assert 0 < ended.seconds < LIMIT
    assert 0 < ended.began < ended.ended
    assert np.array_equal(receiver.pool[dst], writer.pool[src])
    assert np.array_equal(receiver.pool[untouched], before)

    receiver.submit(VerifyPages(named(5), [pack_i32(dst)], ended.slices))
    assert receiver.next() == PagesVerified(named(5), True)
    receiver.pool[dst[150], 7] ^= 1
    receiver.submit(VerifyPages(named(5), [pack_i32(dst)], ended.slices))
    assert receiver.next() == PagesVerified(named(5), False)


def test_a_room_may_end_without_a_page_in_its_last_chunk(pair):
    writer, _ = pair
    writer.submit(send(1, [], []), send(2, [3], [4], last=False), send(2, [], []))
    assert writer.next() == SendEnded(named(1))
    ended = writer.next()
    assert (ended.handover.room, ended.slices, ended.nbytes, ended.error) == (2, summed(writer, [3]), PAGE, None)


def test_pages_of_another_order_are_ours_once_they_are_verified(make_node, monkeypatch):
    """More than one slice; what has the wrong checksum, or an order that can't be made ours, stays as it landed."""
    monkeypatch.setattr(engine, "CHECK_BYTES", 3 * PAGE)
    layout = uniform_layout(8, 2, 1, 16, "bfloat16", PAGE, "blocks")
    node, blind = make_node("tcp", "D", layout=layout), make_node("tcp", "E")
    pages = [*range(1, 12), 40, 30]
    before = node.pool.copy()
    expected = before.copy()
    converter = PageConverter(layout, "tokens")
    for page in pages:
        converter.convert(expected[page])
    right = summed(node, pages)
    node.submit(VerifyPages(named(1), [pack_i32(pages)], [right[0], right[0]], "tokens"))
    assert node.next() == PagesVerified(named(1), False)
    node.submit(VerifyPages(named(2), [pack_i32(pages)], right, "blocks"))
    assert node.next() == PagesVerified(named(2), True)
    assert np.array_equal(node.pool, before)
    node.submit(VerifyPages(named(3), [pack_i32(pages)], right, "tokens"))
    assert node.next() == PagesVerified(named(3), True)
    assert not np.array_equal(expected, before)
    assert np.array_equal(node.pool, expected)
    blind.submit(VerifyPages(named(4), [pack_i32([1])], summed(blind, [1]), "tokens"))
    assert blind.next() == PagesVerified(named(4), False)


LAYERS = 4
LAYERED = uniform_layout(8, LAYERS, 1, 8, "bfloat16", PAGE)
SOME = np.arange(1, 101)


@pytest.fixture
def layered(make_node, kind, monkeypatch):
    """A pair whose pages have layers, two of which are worth a write."""
    monkeypatch.setattr(outgoing_pages, "MIN_AHEAD_BYTES", len(SOME) * PAGE // 2)
    writer, receiver = make_node(kind, "P", layout=LAYERED), make_node(kind, "D", layout=LAYERED)
    receiver.submit(AdmitPeer("P", 1))
    assert receiver.next() == PeerAdmitted("P", 1)
    writer.submit(ConnectPeer("D", 1, receiver.engine.metadata))
    assert writer.next() == PeerConnected("D", 1)
    receiver.engine.submit(GrantPages(named(1), "P", [pack_i32(SOME + 100)]))
    receiver.pool[:] = 0
    return writer, receiver


def test_layers_leave_while_the_others_are_computed(layered):
    writer, receiver = layered
    there, here = (node.pool.reshape(PAGES, LAYERS, -1) for node in (receiver, writer))
    done = LayersDone()
    writer.engine.push(send(1, SOME, SOME + 100), done)
    done.advance(1)
    writer.engine.submit(VerifyPages(named(9), [b""], []))
    assert writer.next() == PagesVerified(named(9), ok=True)  # it has looked at what there is to do
    assert not receiver.pool.any()  # alone a layer is not worth a write
    done.advance(2)
    wait_until(lambda: (there[SOME + 100, :2] == here[SOME, :2]).all(), LIMIT, "the first half lands")
    assert not there[:, 2:].any()
    assert writer.events.empty()
    here[SOME, 2:] ^= 255  # now they are computed
    done.finish()
    writer.engine.wake()
    ended = writer.next()
    assert (ended.error, ended.nbytes) == (None, len(SOME) * PAGE)
    assert {(piece.begin, piece.end) for piece in ended.slices} == {(0, 2), (2, 4)}
    assert_summed_up(writer.pool, SOME, ended.slices, LAYERS)
    assert np.array_equal(receiver.pool[SOME + 100], writer.pool[SOME])
    assert not receiver.pool[: SOME[0] + 100].any()
    whole, wrong = ended.slices, [*ended.slices[:-1], msgspec.structs.replace(ended.slices[-1], checksum=1)]
    for slices, ok in ((whole, True), (wrong, False), (whole[:-1], False), ([*whole, whole[0]], False)):
        receiver.submit(VerifyPages(named(1), [pack_i32(SOME + 100)], slices))
        assert receiver.next() == PagesVerified(named(1), ok)
    receiver.pool[150, -1] ^= 1
    receiver.submit(VerifyPages(named(1), [pack_i32(SOME + 100)], whole))
    assert receiver.next() == PagesVerified(named(1), ok=False)


def test_what_is_computed_already_leaves_by_whole_pages(layered):
    writer, receiver = layered
    done = LayersDone()
    done.finish()
    writer.engine.push(send(1, SOME, SOME + 100), done)
    assert writer.next().slices == summed(writer, SOME)
    assert np.array_equal(receiver.pool[SOME + 100], writer.pool[SOME])


def test_pages_that_are_being_computed_wait_for_nobody_who_ends_them(layered):
    writer, receiver = layered
    done = LayersDone()
    writer.engine.push(send(1, SOME, SOME + 100), done)
    writer.submit(CancelSend(named(1)))
    assert writer.next() == SendEnded(named(1), cancelled=True)
    receiver.engine.submit(GrantPages(named(2), "P", [pack_i32(SOME + 200)]))
    writer.engine.push(send(2, SOME, SOME + 200), done)
    receiver.submit(DisconnectPeer("P", 1))
    assert writer.next() == PeerLinkDown("D", 1)
    ended = writer.next()
    assert (ended.handover, ended.nbytes, ended.cancelled) == (named(2), 0, False)
    assert ended.error
    done.finish()
    assert not receiver.pool.any()


@pytest.mark.parametrize(
    ("slices", "whole"),
    [
        ([(0, 3, 0, 2)], True),
        ([(0, 1, 0, 2), (1, 2, 0, 1), (1, 2, 1, 2)], True),
        ([], False),
        ([(0, 3, 0, 1)], False),
        ([(0, 2, 0, 2)], False),
        ([(0, 3, 0, 2), (2, 1, 1, 2)], False),
        ([(0, 4, 0, 2)], False),
        ([(0, 3, 0, 3)], False),
        ([(0, 3, 0, 2), (0, 1, 1, 1)], False),
        ([(0, 3, 0, 2), (1, 1, 2, 1)], False),
    ],
)
def test_slices_are_all_of_the_pages_or_nothing(slices, whole):
    def look():
        found.append((yield from covers([SliceChecksum(*piece, 1) for piece in slices], {0: (3, 2)})))

    found = []
    list(look())
    assert found == [whole]


def test_without_checksums_slices_are_still_all_of_the_pages(pair):
    writer, receiver = pair
    writer.submit(msgspec.structs.replace(send(1, [1, 2], [3, 4]), checksum=False))
    ended = writer.next()
    assert [piece.checksum for piece in ended.slices] == [0]
    receiver.pool[3] ^= 1
    for slices, checksum, ok in ((ended.slices, False, True), ([], False, False), (ended.slices, True, False)):
        receiver.submit(VerifyPages(named(1), [pack_i32([3, 4])], slices, checksum=checksum))
        assert receiver.next() == PagesVerified(named(1), ok)


@pytest.mark.parametrize("completion", [Completion.POLLED, Completion.DRIVEN])
def test_a_peer_that_stands_still_costs_no_core(completion):
    """A write that nobody announces is asked for without a pause, as long as it may land at any moment."""
    clock = [100.0]
    backend = SlowBackend(completion)
    region = allocate_region(PAGE * PAGES, shared=False)
    made = TransferEngine(
        backend, [PageGroup(region, PAGE)], "P", "127.0.0.1", lambda event: None, clock=lambda: clock[0]
    )
    made._writing["D"] = 1
    made.submit(send(1, [1], [2]))
    made.turn(wait=False)
    assert made._pause() == 0.0
    clock[0] += engine.BRISK_SECONDS * 1.1
    assert made._pause() == engine.POLL_SECONDS
    made.close()


def test_verifying_more_than_one_slice_and_pages_that_cannot_be(pair, monkeypatch):
    monkeypatch.setattr(engine, "CHECK_BYTES", 3 * PAGE)
    node = pair[1]
    pages = [*range(1, 12), 40, 30]
    node.submit(
        VerifyPages(named(1), [pack_i32(pages)], summed(node, pages)),
        VerifyPages(named(2), [pack_i32([0])], summed(node, [0])),
        VerifyPages(named(3), [b""], []),
        VerifyPages(named(4), [pack_i32([PAGES])], []),
    )
    answers = [node.next() for _ in range(4)]
    assert sorted((answer.handover.room, answer.ok) for answer in answers) == [
        (1, True),
        (2, False),
        (3, True),
        (4, False),
    ]


@pytest.mark.parametrize(
    ("src", "dst"),
    [([1, 2], [1]), ([0], [1]), ([1], [0]), ([PAGES], [1]), ([-1], [1]), ([1], [PAGES])],
)
def test_impossible_pages_fail_their_room_only(pair, src, dst):
    writer, receiver = pair
    before = receiver.pool.copy()
    writer.submit(send(1, src, dst))
    assert writer.next().error
    assert np.array_equal(receiver.pool, before)
    writer.submit(send(2, [1], [1]))
    assert writer.next().error is None


def test_rooms_of_unknown_peers_fail_and_take_no_more_pages(pair):
    writer, _ = pair
    writer.submit(send(1, [1], [1], last=False, peer="X"))
    first = writer.next()
    assert first.handover.room == 1
    assert "X is not connected" in first.error
    writer.submit(send(1, [2], [2], last=False, peer="X"), send(1, [3], [3], peer="X"), send(1, [3], [3]))
    assert writer.next().error is None  # those that crossed are dropped, then the number is free again


def test_a_disconnect_that_crosses_the_end_of_its_link_does_nothing_to_the_next(pair):
    writer, receiver = pair
    receiver.submit(DisconnectPeer("P", 1))
    assert (receiver.next(), writer.next()) == (PeerLinkDown("P", 1), PeerLinkDown("D", 1))
    receiver.submit(AdmitPeer("P", 2))
    assert receiver.next() == PeerAdmitted("P", 2)
    writer.submit(DisconnectPeer("D", 1), ConnectPeer("D", 2, receiver.engine.metadata))
    assert writer.next() == PeerConnected("D", 2)
    writer.submit(DisconnectPeer("D", 2))
    assert writer.next() == PeerLinkDown("D", 2)
    assert receiver.next() == PeerLinkDown("P", 2)


@pytest.mark.parametrize("apart", [True, False])
def test_what_comes_late_for_a_link_that_is_over_does_nothing_to_the_next(pair, apart):
    """The scheduler's commands take two ways to the engine, one of them behind steps."""
    writer, receiver = pair
    writer.submit(DisconnectPeer("D", 1))
    assert (receiver.next(), writer.next()) == (PeerLinkDown("P", 1), PeerLinkDown("D", 1))
    receiver.submit(AdmitPeer("P", 2))
    if apart:
        assert receiver.next() == PeerAdmitted("P", 2)
    receiver.submit(DisconnectPeer("P", 1), ConnectPeer("P", 1, writer.engine.metadata), AdmitPeer("P", 1))
    if not apart:
        assert receiver.next() == PeerAdmitted("P", 2)
    writer.submit(ConnectPeer("D", 2, receiver.engine.metadata))
    assert writer.next() == PeerConnected("D", 2)
    writer.submit(send(1, [1], [2]))
    assert writer.next().error is None
    receiver.submit(DisconnectPeer("P", 2))
    assert (receiver.next(), writer.next()) == (PeerLinkDown("P", 2), PeerLinkDown("D", 2))


def test_a_link_that_was_given_up_before_it_was_opened_stays_closed(make_node, kind):
    writer, receiver = make_node(kind, "P"), make_node(kind, "D")
    receiver.submit(DisconnectPeer("P", 3), AdmitPeer("P", 3), ConnectPeer("P", 3, writer.engine.metadata))
    assert receiver.next() == PeerLinkDown("P", 3)
    writer.submit(ConnectPeer("D", 1, receiver.engine.metadata))
    assert "register with it again" in writer.next().error
    assert receiver.events.empty()


def test_pages_for_a_peer_without_a_link_are_not_kept_for_the_next_link(pair, kind, make_node, monkeypatch):
    """Those of a hand-over of before would be written where something else lies by now."""
    monkeypatch.setattr(engine, "SLICE_BYTES", PAGE)
    writer, receiver = pair
    other = make_node(kind, "E")
    writer.submit(ConnectPeer("E", 2, other.engine.metadata))
    assert writer.next() == PeerConnected("E", 2)
    writer.submit(DisconnectPeer("D", 1))
    assert (receiver.next(), writer.next()) == (PeerLinkDown("P", 1), PeerLinkDown("D", 1))
    receiver.submit(AdmitPeer("P", 3))
    assert receiver.next() == PeerAdmitted("P", 3)
    before = receiver.pool.copy()
    # So much for another peer that the turn of what is for D comes when its link is up again.
    busy = [send(room, range(1, 3), range(1 + 2 * room, 3 + 2 * room), peer="E") for room in range(199)]
    late = [send(room, range(1, 50), range(1, 50)) for room in range(5)]
    writer.submit(*busy, *late, ConnectPeer("D", 3, receiver.engine.metadata))
    events = [writer.next() for _ in range(205)]
    assert PeerConnected("D", 3) in events
    ended = [event for event in events if isinstance(event, SendEnded)]
    assert {bool(event.error) for event in ended if event.handover.epoch == "D"} == {True}
    assert {event.error for event in ended if event.handover.epoch == "E"} == {None}
    assert np.array_equal(receiver.pool, before)


def test_a_disconnect_ends_a_connect_that_is_under_way_by_its_number(make_node, kind):
    writer = make_node(kind, "P")
    silent = make_backend(kind, "D", "127.0.0.1")
    with contextlib.closing(allocate_region(PAGE * PAGES, shared=kind == "shm")) as region, contextlib.closing(silent):
        writer.submit(ConnectPeer("D", 7, silent.register([pool_group(kind, region, PAGE)])), DisconnectPeer("D", 7))
        events = [writer.next(), writer.next()]
    assert [(type(event), event.link) for event in events] == [(PeerFailed, 7), (PeerLinkDown, 7)]
    assert events[0].error
    for link in (8, 9):  # one that failed by itself leaves nothing behind, and its end is told when it is asked for
        writer.submit(ConnectPeer("D", link, b"garbage"))
        failed = writer.next()
        assert (failed.link, bool(failed.error)) == (link, True)
        writer.submit(DisconnectPeer("D", link))
        assert writer.next() == PeerLinkDown("D", link)
        assert writer.engine._links == {}


def test_a_later_attempt_at_a_broken_room_is_another_hand_over(pair):
    writer, receiver = pair
    writer.submit(send(1, [0], [1], last=False))
    assert writer.next().error
    again = named(1, 2)
    writer.submit(SendPages(again, [pack_i32([5])], [pack_i32([6])], last=False))
    writer.submit(send(1, [3], [3]))  # the rest of the first crossed its end
    writer.submit(SendPages(again, [pack_i32([7])], [pack_i32([8])], last=True))
    ended = writer.next()
    assert (ended.handover, ended.slices, ended.nbytes) == (again, summed(writer, [5, 7], 0, 1, 2), 2 * PAGE)
    assert (ended.error, ended.cancelled) == (None, False)
    assert np.array_equal(receiver.pool[[6, 8]], writer.pool[[5, 7]])


def test_the_second_direction_of_a_link_opens_beside_its_hand_overs(pair):
    writer, receiver = pair
    writer.submit(send(1, [0], [1], last=False))
    assert writer.next().error
    # Of the same link: what crossed the end of a hand-over is dropped as before.
    writer.submit(AdmitPeer("D", 1))
    assert writer.next() == PeerAdmitted("D", 1)
    receiver.submit(ConnectPeer("P", 1, writer.engine.metadata))
    assert receiver.next() == PeerConnected("P", 1)
    writer.submit(ConnectPeer("D", 1, receiver.engine.metadata))
    assert writer.next() == PeerConnected("D", 1)
    writer.submit(send(1, [3], [3]), send(2, [4], [4]))
    ended = writer.next()
    assert (ended.handover.room, ended.error) == (2, None)
    receiver.submit(send(1, [5], [6], peer="P"))
    assert receiver.next().error is None
    assert np.array_equal(writer.pool[6], receiver.pool[5])
    receiver.submit(DisconnectPeer("P", 1))
    assert (receiver.next(), writer.next()) == (PeerLinkDown("P", 1), PeerLinkDown("D", 1))


def test_cancelling_an_unknown_room_is_answered(pair):
    pair[0].submit(CancelSend(named(77)))
    assert pair[0].next() == SendEnded(named(77), cancelled=True)


def test_a_room_without_its_last_pages_stays_until_cancelled(pair):
    writer, _ = pair
    writer.submit(send(1, [1], [1], last=False), send(2, [2], [2]))
    assert writer.next().handover.room == 2
    writer.submit(CancelSend(named(1)))
    ended = writer.next()
    assert (ended.handover.room, ended.cancelled, ended.error, ended.nbytes) == (1, True, None, PAGE)
    assert writer.events.empty()


def test_disconnecting_ends_the_rooms_and_the_link_on_both_sides(pair):
    writer, receiver = pair
    writer.submit(send(1, [1], [1], last=False), send(2, [1], [2], last=False), DisconnectPeer("D", 1))
    events = [writer.next() for _ in range(3)]
    assert PeerLinkDown("D", 1) in events
    ended = [event for event in events if isinstance(event, SendEnded)]
    assert sorted(event.handover.room for event in ended) == [1, 2]
    assert all(event.error for event in ended)
    assert receiver.next() == PeerLinkDown("P", 1)
    writer.submit(send(3, [1], [1]))
    assert "not connected" in writer.next().error


def test_a_pair_links_again_once_the_receiver_admits_the_writer(pair):
    writer, receiver = pair
    receiver.submit(DisconnectPeer("P", 1))
    assert (receiver.next(), writer.next()) == (PeerLinkDown("P", 1), PeerLinkDown("D", 1))
    writer.submit(ConnectPeer("D", 2, receiver.engine.metadata))
    refused = writer.next()
    assert "register with it again" in refused.error
    assert refused.link == 2
    receiver.submit(AdmitPeer("P", 2))
    assert receiver.next() == PeerAdmitted("P", 2)
    writer.submit(ConnectPeer("D", 3, receiver.engine.metadata), ConnectPeer("D", 3, b"garbage"))
    assert writer.next() == PeerConnected("D", 3)
    writer.submit(send(1, [1], [1]))
    ended = writer.next()
    if ended == PeerConnected("D", 3):  # said again to who asks again
        ended = writer.next()
    assert ended.error is None


def test_hand_overs_that_failed_with_their_link_may_be_sent_by_the_next_one(pair):
    """Who connects anew has heard of their end; those that crossed it are dropped."""
    writer, receiver = pair
    writer.submit(send(1, [1], [1], last=False), DisconnectPeer("D", 1))
    events = [writer.next(), writer.next()]
    assert any(isinstance(event, SendEnded) and event.error for event in events)
    assert receiver.next() == PeerLinkDown("P", 1)
    writer.submit(send(1, [2], [2], last=False))  # it crossed that
    receiver.submit(AdmitPeer("P", 2))
    assert receiver.next() == PeerAdmitted("P", 2)
    writer.submit(ConnectPeer("D", 2, receiver.engine.metadata))
    assert writer.next() == PeerConnected("D", 2)
    writer.submit(send(1, [1, 2], [3, 4]))
    ended = writer.next()
    assert (ended.handover, ended.error, ended.nbytes) == (named(1), None, 2 * PAGE)
    assert np.array_equal(receiver.pool[[3, 4]], writer.pool[[1, 2]])


def test_the_fake_backend_moves_nothing_and_is_always_right(make_node):
    writer, receiver = make_node("fake", "P"), make_node("fake", "D")
    before = receiver.pool.copy()
    writer.submit(ConnectPeer("D", 1, receiver.engine.metadata), send(1, [1, 2], [3, 4]))
    events = [writer.next(), writer.next()]
    assert PeerConnected("D", 1) in events
    ended = next(event for event in events if isinstance(event, SendEnded))
    assert (ended.slices, ended.nbytes, ended.error) == ([], 2 * PAGE, None)
    receiver.submit(VerifyPages(named(1), [pack_i32([3, 4])], 0))
    assert receiver.next() == PagesVerified(named(1), True)
    assert np.array_equal(receiver.pool, before)
    writer.submit(DisconnectPeer("D", 1))
    assert writer.next() == PeerLinkDown("D", 1)


class SlowBackend(TransferBackend):
    """Writes land only when the test says so."""

    def __init__(self, completion=Completion.SIGNALLED):
        self.can = Capabilities(completion=completion)
        self.writes = []
        self.up = []
        self.parted = []
        self.bell = threading.Event()

    def register(self, groups):
        return b"slow"

    def connect(self, peer, metadata):
        self.up.append(LinkUp(peer))

    def admit(self, peer):
        raise AssertionError("not asked for")

    def write(self, pages):
        if pages.handover.epoch != "D":
            raise NotConnected(pages.handover.epoch)
        self.writes.append((WriteHandle(), int(pages.src[0]), len(pages.src) * PAGE))
        return self.writes[-1][0]

    def poll(self, handle):
        return handle.state

    def disconnect(self, peer):
        self.parted.append(peer)

    def progress(self, timeout):
        if not self.up:
            self.bell.wait(timeout)
        self.bell.clear()
        events, self.up = self.up, []
        return events

    def wake(self):
        self.bell.set()

    def close(self):
        pass


@pytest.fixture
def slow(make_node, monkeypatch):
    """An engine with slices of 4 pages and a window of 8, over a backend whose writes the test lands."""
    monkeypatch.setattr(engine, "SLICE_BYTES", 4 * PAGE)
    monkeypatch.setattr(engine, "WINDOW_BYTES", 8 * PAGE)
    node = make_node(SlowBackend(), "P")
    node.backend = node.engine._backend
    node.submit(ConnectPeer("D", 1, b"slow"))
    assert node.next() == PeerConnected("D", 1)
    return node


def settle(node):
    """Wait until the engine has obeyed everything so far and sleeps."""
    node.submit(CancelSend(named(999)))
    assert node.next() == SendEnded(named(999), cancelled=True)
    node.submit(CancelSend(named(999)))
    assert node.next() == SendEnded(named(999), cancelled=True)


def land(node, count=1):
    """Let the oldest writes under way land."""
    for handle, _, _ in [w for w in node.backend.writes if w[0].state is WriteState.PENDING][:count]:
        handle.state = WriteState.DONE
    node.backend.wake()


def test_a_small_room_passes_between_the_slices_of_a_huge_one(slow):
    slow.submit(send(1, range(100, 200), range(100, 200)))
    settle(slow)
    assert len(slow.backend.writes) == 2  # the window
    slow.submit(send(2, [7], [7]))
    settle(slow)
    land(slow, 2)
    settle(slow)
    assert 7 in [page for _, page, _ in slow.backend.writes[2:5]]


def test_a_cancel_takes_effect_between_slices_and_is_answered_when_those_under_way_have_landed(slow):
    slow.submit(send(1, range(100, 200), range(100, 200)))
    settle(slow)
    slow.submit(CancelSend(named(1)))
    settle(slow)
    assert slow.events.empty()
    land(slow, 1)
    settle(slow)
    assert slow.events.empty()
    land(slow, 1)
    ended = slow.next()
    assert (ended.handover.room, ended.cancelled, ended.nbytes) == (1, True, 8 * PAGE)
    assert len(slow.backend.writes) == 2


def test_a_failed_write_ends_its_room_only(slow):
    slow.submit(send(1, range(100, 104), range(100, 104), last=False), send(2, [7], [7]))
    settle(slow)
    slow.backend.writes[0][0].error = "broken"
    slow.backend.writes[0][0].state = WriteState.FAILED
    land(slow)
    ended = {event.handover.room: event for event in (slow.next(), slow.next())}
    assert ended[1].error == "broken"
    assert (ended[2].error, ended[2].slices) == (None, summed(slow, [7]))


def test_a_write_whose_end_is_unknown_holds_its_room_until_the_link_is_down(slow):
    slow.submit(send(1, range(100, 106), range(100, 106)), send(2, [7], [7]))
    settle(slow)
    (lost, _, _), *others = slow.backend.writes
    lost.state, lost.error = WriteState.LOST, "who knows"
    slow.backend.wake()
    settle(slow)
    assert slow.backend.parted == ["D"]  # once
    for handle, _, _ in others:
        handle.state = WriteState.DONE
    slow.backend.wake()
    ended = slow.next()
    assert (ended.handover.room, ended.error) == (2, None)  # the other was in time
    settle(slow)
    assert slow.events.empty()
    lost.state = WriteState.FAILED
    slow.backend.up.append(LinkDown("D", "parted"))
    slow.backend.wake()
    assert slow.next() == PeerLinkDown("D", 1)
    ended = slow.next()
    assert (ended.handover.room, ended.error, ended.nbytes) == (1, "who knows", 2 * PAGE)
    assert slow.backend.parted == ["D"]


def test_a_broken_engine_says_so_instead_of_limping_on():
    broken = []
    region = allocate_region(PAGE * 2, shared=False)

    def emit(event):
        raise RuntimeError("the channel is gone")

    engine = TransferEngine("fake", [PageGroup(region, PAGE)], "P", "127.0.0.1", emit, broken.append).start()
    engine.submit(CancelSend(named(1)))
    engine.close()
    assert [str(error) for error in broken] == ["the channel is gone"]
    region.close()


def test_an_idle_engine_sleeps(make_node, monkeypatch, kind):
    node = make_node(kind, "P")
    turns = []
    progress = node.engine._backend.progress

    def counted(timeout):
        turns.append(timeout)
        return progress(timeout)

    monkeypatch.setattr(node.engine._backend, "progress", counted)
    settle(node)
    assert turns[-1] is None
    assert len(turns) <= 4
