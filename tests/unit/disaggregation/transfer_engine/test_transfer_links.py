"""Links of the transfer engine: connecting, disconnecting, and messages of a link that is over."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from support.handovers import named
from support.staged_pools import pool_group
from support.transfer_node import PAGE, PAGES, send

from pdserve.disaggregation.transfer import push_queue
from pdserve.disaggregation.transfer.backends.load import make_backend
from pdserve.mem_cache.kv_pages.region import allocate_region
from pdserve.messages.worker import (
    AdmitPeer,
    ConnectPeer,
    DisconnectPeer,
    PeerAdmitted,
    PeerConnected,
    PeerFailed,
    PeerLinkDown,
    SendEnded,
)


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
    """Pages of an earlier hand-over would be written where something else lies by now."""
    monkeypatch.setattr(push_queue, "SLICE_BYTES", PAGE)
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
    if ended == PeerConnected("D", 3):  # the second question has an answer too
        ended = writer.next()
    assert ended.error is None


def test_hand_overs_that_failed_with_their_link_may_be_sent_by_the_next_one(pair):
    """A writer that connects anew has been told of their end. Pages that crossed this are dropped."""
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
