"""What a peer may open at a prefill: rooms that no request has come for, page numbers, tombstones."""

from __future__ import annotations

import pytest
from support.handovers import named
from support.sim_pair import LIMITS, SimPair, make_peer

from pdserve.disaggregation.handover import unclaimed_rooms
from pdserve.disaggregation.handover.failure import Failure
from pdserve.disaggregation.handover.kv_sender import digest_of
from pdserve.disaggregation.handover.unclaimed_rooms import Tombstones, UnclaimedRooms
from pdserve.messages.handover import Abort, AbortAck, RoomQueued, TransferFailed, TransferRequest


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Limits that a test reaches at once."""
    for name, value in {"PEER_ROOMS": 10, "ALL_ROOMS": 15, "ALL_BYTES": 1000, "MAX_TOMBSTONES": 20}.items():
        monkeypatch.setattr(unclaimed_rooms, name, value)


def request(room, pages=1, epoch="decode"):
    return TransferRequest("prefill", named(room, epoch=epoch), 30, 1, 0, [bytes(4 * pages)])


def queued(peer, room):
    return RoomQueued("prefill", named(room, epoch=peer.epoch))


def test_rooms_are_counted_by_peer_and_in_all():
    rooms = UnclaimedRooms()
    assert [rooms.admit("a", i, 0) for i in range(10)] == [None] * 10
    assert rooms.admit("a", 3, 0) is None  # counted already
    assert "10 rooms" in rooms.admit("a", 10, 0)
    assert [rooms.admit("b", i, 0) for i in range(5)] == [None] * 5
    assert "15 rooms" in rooms.admit("b", 5, 0)
    rooms.drop("a", 0)
    rooms.drop("a", 0)
    rooms.drop("nobody", 0)
    assert rooms.admit("b", 5, 0) is None
    assert len(rooms) == 15
    for peer in ("a", "b"):
        for room in range(11):
            rooms.drop(peer, room)
    assert (len(rooms), rooms._rooms, rooms._bytes) == (0, {}, 0)


def test_page_numbers_are_counted_in_bytes():
    rooms = UnclaimedRooms()
    assert rooms.admit("a", 1, 600) is None
    assert "page numbers" in rooms.admit("b", 2, 600)
    rooms.drop("a", 1)
    assert rooms.admit("b", 2, 600) is None


def test_tombstones_go_with_time_or_for_newer_ones():
    graves = Tombstones()
    for i in range(25):
        graves.add(i, Failure(503, f"why {i}"), float(i))
    assert len(graves) == 20
    assert graves.take(4) is None
    assert (graves.take(5), graves.take(5)) == (Failure(503, "why 5"), None)
    graves.add(6, Failure(503, "again"), 30.0)  # last in line now
    graves.expire(unclaimed_rooms.TOMBSTONE_SECONDS + 23.5)
    assert [room for room in range(30) if room in graves] == [6, 24]


@pytest.mark.parametrize("message", [RoomQueued("prefill", named(1)), request(1)])
def test_a_flood_of_rooms_is_refused_and_honest_peers_go_on(message):
    pair = SimPair()
    senders, stranger = pair.prefill.senders, make_peer("stranger")
    for room in range(100, 200):
        if isinstance(message, RoomQueued):
            senders.on_queued(stranger, queued(stranger, room), pair.now)
        else:
            senders.on_request(stranger, request(room, epoch="stranger"), pair.now)
    assert len(senders.rooms) == 10
    refused = [m for m in stranger.unsent if isinstance(m, TransferFailed)]
    assert len(refused) == 90
    assert {m.status for m in refused} == {503}
    assert "no request has come for" in refused[0].reason

    pair.submit("a", range(30), 7, max_new_tokens=6)
    for _ in range(2000):
        for move in pair.moves():
            move()
        if "a" in pair.decode.ends:
            break
    assert pair.decode.ends["a"].meta is not None

    senders.on_gone(stranger)
    assert (senders.rooms, len(senders._rooms.unclaimed)) == ({}, 0)


def test_a_room_that_is_claimed_counts_no_more():
    pair = SimPair()
    senders = pair.prefill.senders
    for room in range(10):
        senders.on_queued(pair.peer, queued(pair.peer, room), pair.now)
    pair.submit("a", range(30), 3, legs=["prefill"])
    assert len(senders._rooms.unclaimed) == 9
    senders.on_queued(pair.peer, queued(pair.peer, 77), pair.now)
    assert 77 in senders.rooms


def test_unclaimed_rooms_are_given_up_with_their_count():
    pair = SimPair()
    senders = pair.prefill.senders
    for room in range(5):
        senders.on_request(pair.peer, request(room), pair.now)
    senders.tick(pair.now + LIMITS.bootstrap + 1)
    assert (senders.rooms, len(senders._rooms.unclaimed)) == ({}, 0)


def test_aborts_of_rooms_that_are_nowhere_leave_a_bounded_trace():
    pair = SimPair()
    stranger = make_peer("stranger")
    for room in range(500):
        pair.prefill.senders.on_abort(stranger, Abort("prefill", named(room, epoch="stranger"), "x" * 2000), pair.now)
    assert len(pair.prefill.senders._rooms.given_up) == 20
    assert [type(m) for m in stranger.unsent] == [AbortAck] * 500
    pair.prefill.senders.tick(pair.now + unclaimed_rooms.TOMBSTONE_SECONDS + 1)
    assert len(pair.prefill.senders._rooms.given_up) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"decode_prefix_len": 5},  # no page's border
        {"decode_prefix_len": 1 << 20},
        {"dst_pages": [b""]},
        {"dst_pages": [bytes(4 * 9)]},
        {"prompt_len": 29},
        {"prompt_digest": 1},
    ],
)
def test_a_request_that_does_not_fit_its_room_fails_it_and_writes_nothing(change):
    pair = SimPair()
    pair.submit("a", range(30), 7, max_new_tokens=6, legs=["prefill"])
    req = pair.prefill.senders.rooms[7].req
    fields = {
        "prompt_len": 30,
        "prompt_digest": digest_of(req, 30),
        "decode_prefix_len": 0,
        "dst_pages": [bytes(4 * 8)],
    }
    pair.prefill.senders.on_request(
        pair.peer, TransferRequest("prefill", named(7, epoch="decode"), **(fields | change)), pair.now
    )
    (failed,) = pair.peer.unsent
    assert failed.status == 409
    assert pair.prefill.senders.rooms == {}
    assert pair.pushes == {}


def test_a_stranger_takes_no_room_of_another_decode():
    pair = SimPair()
    pair.submit("a", range(30), 7, max_new_tokens=6, legs=["prefill"])
    senders, stranger = pair.prefill.senders, make_peer("stranger")
    senders.on_queued(pair.peer, queued(pair.peer, 7), pair.now)
    senders.on_queued(stranger, queued(stranger, 7), pair.now)
    senders.on_request(stranger, request(7, epoch="stranger"), pair.now)
    senders.on_abort(stranger, Abort("prefill", named(7, epoch="stranger"), "mine"), pair.now)
    senders.on_gone(stranger)
    assert senders.rooms[7].peer is pair.peer
    assert senders.rooms[7].transfer_request is None
    assert senders.rooms[7].failure is None
    assert [m.status for m in stranger.unsent if isinstance(m, TransferFailed)] == [409]  # told once
