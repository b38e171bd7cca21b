"""What a library may do to a leased link, by one that does it on command."""

from __future__ import annotations

import queue

import numpy as np
import pytest
from support.copy_library import CopyLibrary
from support.handovers import named
from support.machine import limit

from pdserve.disaggregation.transfer.engine import TransferEngine
from pdserve.mem_cache.kv_pages.page_group import PageGroup
from pdserve.mem_cache.kv_pages.region import allocate_region
from pdserve.messages.base import pack_i32
from pdserve.messages.worker import (
    AdmitPeer,
    ConnectPeer,
    PeerAdmitted,
    PeerConnected,
    PeerFailed,
    PeerLinkDown,
    SendEnded,
    SendPages,
)

PAGE, PAGES = 4096, 9


class Side:
    def __init__(self, epoch, **limits):
        self.library = CopyLibrary(epoch, **limits)
        region = allocate_region(PAGE * PAGES, shared=False)
        self.pool = np.frombuffer(region.buffer, np.uint8).reshape(PAGES, PAGE)
        self.events = queue.Queue()
        self.engine = TransferEngine(
            self.library, [PageGroup(region, PAGE)], epoch, "127.0.0.1", self.events.put
        ).start()

    def next(self):
        return self.events.get(timeout=limit(10))


@pytest.fixture
def start():
    sides = []

    def make(*args, **kwargs):
        sides.append(Side(*args, **kwargs))
        return sides[-1]

    yield make
    for side in sides:
        side.engine.close()


def dial(writer, owner):
    owner.engine.submit(AdmitPeer("P", 1))
    assert owner.next() == PeerAdmitted("P", 1)
    writer.engine.submit(ConnectPeer("D", 1, owner.engine.metadata))


@pytest.fixture
def pair(start):
    writer, owner = start("P", stall_seconds=0.3), start("D")
    dial(writer, owner)
    assert writer.next() == PeerConnected("D", 1)
    assert (owner.library.endpoints, writer.library.initiators) == (1, 1)
    writer.pool[:] = 7
    return writer, owner


def send(side, room=1):
    side.engine.submit(SendPages(named(room), [pack_i32([1, 2, 5])], [pack_i32([3, 4, 8])], True))


def test_pages_go_by_the_library(pair):
    writer, owner = pair
    send(writer)
    assert writer.next().nbytes == 3 * PAGE
    assert (owner.pool[[3, 4, 8]] == 7).all()
    assert (np.delete(owner.pool, [3, 4, 8], axis=0) == 0).all()


@pytest.mark.parametrize(
    ("what", "why"), [("refuses", "not taken"), ("fails", "it failed"), ("holds", "does not answer")]
)
def test_a_write_that_fails_ends_the_link_on_both_sides_and_its_rooms(pair, what, why):
    writer, owner = pair
    setattr(writer.library, what, True)
    send(writer)
    assert writer.next() == PeerLinkDown("D", 1)  # first, so that it is known when the room ends
    ended = writer.next()
    assert isinstance(ended, SendEnded)
    assert why in ended.error
    assert owner.next() == PeerLinkDown("P", 1)
    assert (owner.library.endpoints, writer.library.initiators) == (0, 0)


def test_an_endpoint_that_breaks_ends_the_link(pair):
    writer, owner = pair
    owner.library.endpoint_breaks = True
    owner.engine.submit(AdmitPeer("Q", 1))  # a turn
    assert {type(owner.next()), type(owner.next())} == {PeerAdmitted, PeerLinkDown}
    assert writer.next() == PeerLinkDown("D", 1)
    assert (owner.library.endpoints, writer.library.initiators) == (0, 0)


@pytest.mark.parametrize(("ready", "why"), [(None, "nobody there"), (False, "does not answer")])
def test_a_peer_that_the_library_does_not_reach_fails_the_connect(start, ready, why):
    writer, owner = start("P", handshake_seconds=0.3), start("D")
    writer.library.ready = ready
    dial(writer, owner)
    failed = writer.next()
    assert isinstance(failed, PeerFailed)
    assert why in failed.error
    assert owner.next() == PeerLinkDown("P", 1)
    assert (owner.library.endpoints, writer.library.initiators) == (0, 0)
