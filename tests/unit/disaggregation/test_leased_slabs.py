"""Slabs that a library fills: their order, what comes back, and what no honest end of a lease sends."""

from __future__ import annotations

import queue
import socket

import msgspec
import numpy as np
import pytest
from support.copy_library import CopyLibrary
from support.handovers import named
from support.machine import limit
from support.processes import wait_until
from support.staged_pools import held, slabs_of, staged_group

from pdserve.disaggregation.transfer.backends.handshake import WIRE_VERSION, Greeting, Offer, frame
from pdserve.disaggregation.transfer.backends.leased_backend import CONTACT_BYTES
from pdserve.disaggregation.transfer.backends.write_requests import (
    MAX_REQUESTS,
    OWNER_MESSAGE,
    WRITER_MESSAGE,
    LeaseMessage,
)
from pdserve.disaggregation.transfer.engine import TransferEngine
from pdserve.mem_cache.kv_pages.region import RegionError
from pdserve.messages.base import pack_i32
from pdserve.messages.worker import (
    AdmitPeer,
    ConnectPeer,
    DisconnectPeer,
    GrantPages,
    PeerAdmitted,
    PeerConnected,
    PeerLinkDown,
    RevokePages,
    SendEnded,
    SendPages,
)

LIMIT = limit(10.0)
PAGE, PAGES = 4096, 9


class Node:
    """An engine over a pool on a device, with one slab that takes two pages."""

    def __init__(self, epoch: str, **limits) -> None:
        self.pool = np.full((PAGES, PAGE), ord(epoch), np.uint8)
        self.library = CopyLibrary(epoch, **limits)
        self.slabs = slabs_of(1, 2 * PAGE)
        self.group = staged_group(self.pool, 3, self.slabs)
        self.events: queue.Queue = queue.Queue()
        self.engine = TransferEngine(self.library, [self.group], epoch, "127.0.0.1", self.events.put).start()

    def next(self):
        return self.events.get(timeout=LIMIT)

    def send(self, src, dst, room=1):
        self.engine.submit(SendPages(named(room), [pack_i32(src)], [pack_i32(dst)], True))

    def grant(self, peer, pages, room=1):
        self.engine.submit(GrantPages(named(room), peer, [pack_i32(pages)]))


@pytest.fixture
def start():
    nodes = []

    def make(*args, **kwargs):
        nodes.append(Node(*args, **kwargs))
        return nodes[-1]

    yield make
    for node in nodes:
        node.engine.close()


def link(writer: Node, owner: Node, number: int = 1) -> None:
    epoch = writer.library.epoch
    owner.engine.submit(AdmitPeer(epoch, number))
    assert owner.next() == PeerAdmitted(epoch, number)
    writer.engine.submit(ConnectPeer("D", number, owner.engine.metadata))
    assert writer.next() == PeerConnected("D", number)


@pytest.mark.parametrize("how", ["it goes on", "it parts", "its pages are taken back"])
def test_who_waits_for_a_slab_gets_it_when_another_is_done_with_it(start, how):
    owner, one, other = start("D"), start("P"), start("Q")
    link(one, owner)
    link(other, owner, 2)
    other.library.holds = True
    owner.grant("Q", [1, 2, 3], room=9)
    other.send([1, 2, 3], [1, 2, 3], room=9)
    wait_until(lambda: owner.slabs.free == 0, LIMIT, "Q has the slab")
    owner.grant("P", [4, 5, 6])
    one.send([4, 5, 6], [4, 5, 6])
    wait_until(lambda: owner.library._receive_buffers.line, LIMIT, "P stands in line")
    assert (owner.pool == ord("D")).all()
    if how == "it goes on":
        other.library.holds = False
        other.engine.wake()
        assert other.next().error is None
        assert (owner.pool[1:4] == ord("Q")).all()
    else:
        owner.engine.submit(DisconnectPeer("Q", 2) if how == "it parts" else RevokePages(named(9)))
        assert owner.next() == PeerLinkDown("Q", 2)
        assert {type(other.next()), type(other.next())} == {PeerLinkDown, SendEnded}
        assert (owner.pool[1:4] == ord("D")).all()
    assert one.next().error is None
    assert (owner.pool[4:7] == ord("P")).all()
    if how == "it goes on":
        # Two pages of each, and only then one of each: no writer had the slab twice while another waited.
        assert owner.group.staging.device.writes == [2 * PAGE, 2 * PAGE, PAGE, PAGE]
    assert held(owner.engine) == held(one.engine) == held(other.engine) == 0


def test_pages_wait_for_their_grant_and_end_the_link_where_it_does_not_come(start, caplog):
    caplog.set_level("INFO")
    owner, writer = start("D", stall_seconds=0.5), start("P")
    link(writer, owner)
    writer.send([1], [1])
    wait_until(lambda: ungranted(owner), LIMIT, "its pages wait")
    owner.grant("P", [1])
    assert writer.next().error is None
    writer.send([1], [2], room=2)
    assert writer.next() == PeerLinkDown("D", 1)
    assert writer.next().error
    assert owner.next() == PeerLinkDown("P", 1)
    assert "wants to write pages that it was not asked for" in caplog.text
    assert (owner.pool[2] == ord("D")).all()


def ungranted(owner: Node) -> bool:
    return any(link._slabs._ungranted for link in list(owner.library._links))


def test_pages_that_the_owner_does_not_have_are_refused_and_the_link_stays(start):
    owner, writer = start("D"), start("P")
    link(writer, owner)
    peer = writer.library._peers["D"].outgoing
    # A pool that has shrunk since it was offered, as the writer knows it.
    peer.offer.groups[0] = msgspec.structs.replace(peer.offer.groups[0], num_pages=PAGES + 5)
    writer.send([1], [PAGES])
    assert "no such pages" in writer.next().error
    owner.grant("P", [1], room=2)
    writer.send([1], [1], room=2)
    assert writer.next().error is None


class Stranger:
    """A writer that has been let in, and says what it likes."""

    def __init__(self, owner: Node) -> None:
        offer = msgspec.msgpack.decode(owner.engine.metadata, type=Offer)
        self.sock = socket.create_connection((offer.place, offer.port), LIMIT)
        self.sock.sendall(frame(Greeting(WIRE_VERSION, "Q", "D", offer.secret)))
        length = int.from_bytes(self.sock.recv(4, socket.MSG_WAITALL), "little")
        self.sock.recv(length, socket.MSG_WAITALL)

    def request(self, number, pages, *, group=0, layers=(0, 1), count=None, kind=LeaseMessage.REQUEST):
        word = WRITER_MESSAGE.pack(kind, number, 1, 1, group, *layers, len(pages) if count is None else count)
        self.sock.sendall(word + np.array(pages, "<i4").tobytes())

    def reply(self):
        return OWNER_MESSAGE.unpack(self.sock.recv(OWNER_MESSAGE.size, socket.MSG_WAITALL))


WORDS = {
    "no kind": lambda q: q.request(0, [1], kind=9),
    "the owner's kind": lambda q: q.request(0, [1], kind=LeaseMessage.LANDED),
    "no group": lambda q: q.request(0, [1], group=7),
    "no layers": lambda q: q.request(0, [1], layers=(1, 1)),
    "layers that are none": lambda q: q.request(0, [1], layers=(0, 2)),
    "no pages": lambda q: q.request(0, []),
    "more pages than any batch": lambda q: q.request(0, [], count=1 << 30),
    "filled, and nothing was asked for": lambda q: q.request(0, [], kind=LeaseMessage.WRITTEN),
    "the same batch again": lambda q: [q.request(0, [5]), q.request(0, [5])],
    "more batches than any writer": lambda q: [q.request(i, [5]) for i in range(MAX_REQUESTS + 1)],
    "filled before there was a slab": lambda q: [q.request(0, [5]), q.request(0, [], kind=LeaseMessage.WRITTEN)],
}


@pytest.mark.parametrize("what", WORDS)
def test_what_no_writer_says_ends_its_link_and_nothing_else(start, what):
    owner, writer = start("D"), start("P")
    link(writer, owner)
    stranger = Stranger(owner)
    WORDS[what](stranger)
    assert owner.next() == PeerLinkDown("Q", 0)
    owner.grant("P", [1, 2, 3])
    writer.send([1, 2, 3], [1, 2, 3])
    assert writer.next().error is None
    assert held(owner.engine) == 0
    stranger.sock.close()


def test_a_writer_that_goes_in_the_middle_leaves_its_slab(start):
    owner = start("D")
    stranger = Stranger(owner)
    owner.grant("Q", [1, 2, 3])
    stranger.request(0, [1, 2, 3])
    assert stranger.reply() == (LeaseMessage.SLAB, 0, 0, 2)
    stranger.sock.close()
    assert owner.next() == PeerLinkDown("Q", 0)
    assert held(owner.engine) == 0
    assert (owner.pool == ord("D")).all()


NOTES = {
    "a slab behind the last": ((LeaseMessage.SLAB, 0, PAGE, 2), "does not have"),
    "a slab for more pages than were asked for": ((LeaseMessage.SLAB, 0, 0, 4), "were not requested"),
    "a slab for none": ((LeaseMessage.SLAB, 0, 0, 0), "were not requested"),
    "landed before it was sent": ((LeaseMessage.LANDED, 0, 0, 0), "no meaning"),
    "another batch": ((LeaseMessage.SLAB, 7, 0, 1), "was not sent"),
    "the writer's kind": ((LeaseMessage.REQUEST, 0, 0, 0), "no meaning"),
    "another kind of leave": ((LeaseMessage.POOL, 0, 0, 3), "no meaning"),
}


@pytest.mark.parametrize("what", NOTES)
def test_what_no_owner_says_ends_the_link(start, what):
    owner, writer = start("D"), start("P")
    link(writer, owner)
    writer.send([1, 2, 3], [1, 2, 3])
    wait_until(lambda: ungranted(owner), LIMIT, "its pages wait")
    [incoming] = owner.library._links
    # By the socket itself: the engine's thread has nothing to send meanwhile.
    note, why = NOTES[what]
    incoming.stream.sock.sendall(OWNER_MESSAGE.pack(*note))
    assert writer.next() == PeerLinkDown("D", 1)
    assert why in writer.next().error
    assert owner.next() == PeerLinkDown("P", 1)
    assert held(writer.engine) == 0
    assert (owner.pool == ord("D")).all()


def test_slabs_without_room_for_the_first_contact_are_refused():
    pool = np.zeros((4, 64), np.uint8)
    with pytest.raises(RegionError, match=f"{CONTACT_BYTES} bytes behind the slabs"):
        CopyLibrary("D").register([staged_group(pool, 1, slabs_of(1, 64))])
