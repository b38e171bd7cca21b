"""The transfer engine: pages and checksums of rooms; two engines in one process."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from support.handovers import named
from support.layouts import uniform_layout
from support.processes import wait_until
from support.slices import assert_summed_up
from support.transfer_node import LIMIT, PAGE, PAGES, send, summed

from pdserve.disaggregation.transfer import outgoing_pages, received_pages
from pdserve.disaggregation.transfer.page_check import covers
from pdserve.mem_cache.kv_pages.page_order import PageConverter
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
    PeerLinkDown,
    SendEnded,
    SendPages,
    SliceChecksum,
    VerifyPages,
)
from pdserve.runtime.layers_done import LayersDone


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
    monkeypatch.setattr(received_pages, "CHECK_BYTES", 3 * PAGE)
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
    unknown = "pages in the order 'tokens', and nothing is known of our own"
    assert blind.next() == PagesVerified(named(4), ok=False, error=unknown)


LAYERS = 4


LAYERED = uniform_layout(8, LAYERS, 1, 8, "bfloat16", PAGE)


SOME = np.arange(1, 101)


@pytest.fixture
def layered(make_node, kind, monkeypatch):
    """Link two nodes with pages of several layers. Two layers are enough for a write of their own."""
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


def test_pages_that_are_being_computed_are_ended_without_a_wait(layered):
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


def test_verifying_more_than_one_slice_and_pages_that_cannot_be(pair, monkeypatch):
    monkeypatch.setattr(received_pages, "CHECK_BYTES", 3 * PAGE)
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


def test_pages_that_can_not_be_granted_are_reported_at_once(pair):
    writer, receiver = pair
    for room, page in ((1, 0), (2, PAGES)):
        receiver.engine.submit(GrantPages(named(room), "P", [pack_i32([page])]))
        outside = f"a destination page lies outside of 1 … {PAGES - 1}"
        assert receiver.next() == PagesVerified(named(room), ok=False, error=outside)
    receiver.engine.submit(GrantPages(named(3), "P", []))
    groups = "destination pages of 0 groups where there are 1"
    assert receiver.next() == PagesVerified(named(3), ok=False, error=groups)
    writer.submit(send(4, [1], [1]))
    assert writer.next().error is None


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
