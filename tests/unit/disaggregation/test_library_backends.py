"""Backends that move bytes by libraries, between real processes that die, hang, come back and are cut off."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest
from support.handovers import named
from support.libraries import is_missing
from support.machine import limit
from support.processes import freeze, wait_until
from support.transfer_child import Child

from pdserve.messages.base import pack_i32
from pdserve.messages.worker import (
    AdmitPeer,
    CancelSend,
    ConnectPeer,
    DisconnectPeer,
    PagesVerified,
    PeerAdmitted,
    PeerConnected,
    PeerLinkDown,
    SendEnded,
    SendPages,
    VerifyPages,
)

PAGE, PAGES = 64 << 10, 513
ALL = np.arange(1, PAGES, dtype=np.int32)
QUIET_SECONDS = 0.5


@pytest.fixture(scope="module", params=["nixl", pytest.param("mooncake", marks=pytest.mark.slow)])
def kind(request):
    if is_missing(request.param):
        pytest.skip(f"{request.param} is not installed here")
    return request.param


@pytest.fixture
def start(kind):
    children = []

    def make(epoch, **kwargs):
        children.append(Child(kind, epoch, page=PAGE, pages=PAGES, **kwargs))
        children[-1].pool[:] = len(children)
        return children[-1]

    yield make
    for child in children:
        child.close()


def connect(writer, owner, link=1):
    owner.submit(AdmitPeer(writer.epoch, link))
    assert owner.next() == PeerAdmitted(writer.epoch, link)
    writer.submit(ConnectPeer(owner.epoch, link, owner.metadata))
    assert writer.next() == PeerConnected(owner.epoch, link)


def send(room, src, dst, *, last=True, peer="D"):
    return SendPages(named(room, epoch=peer), [pack_i32(src)], [pack_i32(dst)], last)


def write_for_ever(writer, epoch="D"):
    """Write rooms of all pages, one after the other, until something goes wrong. Returns after the first room."""
    first = threading.Event()

    def run():
        room = 100
        try:
            while True:
                writer.submit(send(room, ALL, ALL, peer=epoch))
                event = writer.next()
                if not isinstance(event, SendEnded) or event.error:
                    return
                first.set()
                room += 1
        except Exception:  # noqa: BLE001 - it was killed, which is what it is for
            return

    threading.Thread(target=run, daemon=True).start()
    assert first.wait(limit(20))


def assert_untouched(owner, mark):
    """Assert that nothing is written any more, for ``QUIET_SECONDS``. Peers write other bytes than ``mark``."""
    owner.pool[:] = mark
    threading.Event().wait(QUIET_SECONDS)
    assert (owner.pool == mark).all()


@pytest.mark.parametrize("kind", ["nixl", "mooncake"], indirect=True)
def test_pages_land_and_no_others_and_the_checksum_verifies(start):
    writer, owner = start("P"), start("D")
    connect(writer, owner)
    rng = np.random.default_rng(1)
    writer.pool[:] = rng.integers(0, 256, writer.pool.shape, dtype=np.uint8)
    src, dst = rng.permutation(ALL)[:300], rng.permutation(ALL)[:300]
    expected = owner.pool.copy()
    expected[dst] = writer.pool[src]
    writer.submit(send(1, src[:7], dst[:7], last=False), send(1, src[7:], dst[7:]))
    ended = writer.next()
    assert (ended.error, ended.nbytes) == (None, 300 * PAGE)
    assert np.array_equal(owner.pool[1:], expected[1:])  # page 0 is where the first contact goes
    for slices, ok in ((ended.slices, True), (ended.slices[:-1], False)):
        owner.submit(VerifyPages(named(1), [pack_i32(dst)], slices))
        assert owner.next() == PagesVerified(named(1), ok)


def test_both_directions_and_two_peers_at_once(start):
    one, two, three = start("A"), start("B"), start("C")
    for link, (writer, owner) in enumerate([(one, two), (two, one), (one, three), (three, two)], 1):
        connect(writer, owner, link)
    jobs = [(one, two, ALL[:100]), (two, one, ALL[100:200]), (one, three, ALL[:100]), (three, two, ALL[200:300])]
    for writer, owner, pages in jobs:
        writer.submit(send(5, pages, pages, peer=owner.epoch))
    for writer, _, _ in jobs:
        assert writer.next().error is None
    for writer, owner, pages in jobs:
        assert np.array_equal(owner.pool[pages], writer.pool[pages])


def test_a_killed_writer_is_reported_and_writes_no_more(start):
    writer, owner = start("P"), start("D")
    connect(writer, owner)
    write_for_ever(writer)
    writer.process.kill()
    assert owner.next(5) == PeerLinkDown("P", 1)
    assert_untouched(owner, 77)
    again = start("P2")
    connect(again, owner, 2)
    again.submit(send(1, [5], [6]))
    assert again.next().error is None
    assert (owner.pool[6] == 3).all()


def test_a_killed_receiver_fails_its_rooms_and_no_others(start):
    writer, owner, healthy = start("P"), start("D"), start("E")
    connect(writer, owner)
    connect(writer, healthy, 2)
    freeze(owner.process.pid)  # so that it is in the middle
    writer.submit(send(1, ALL, ALL), send(2, ALL, ALL, peer="E"))
    assert writer.next() is not None
    owner.process.kill()
    reported = [writer.next(), writer.next()]
    assert PeerLinkDown("D", 1) in reported
    assert any(isinstance(event, SendEnded) and event.error for event in reported)
    assert np.array_equal(healthy.pool[1:], writer.pool[1:])
    writer.submit(send(3, [7], [8], peer="E"))
    assert writer.next().error is None


@pytest.mark.parametrize("frozen", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_who_is_parted_with_writes_no_more_and_others_do(start, frozen):
    writer, other, owner = start("P"), start("Q"), start("D")
    connect(writer, owner)
    connect(other, owner, 2)
    write_for_ever(writer)
    if frozen:
        freeze(writer.process.pid)
    owner.submit(DisconnectPeer("P", 1))
    assert owner.next(10) == PeerLinkDown("P", 1)
    owner.pool[:] = 88
    writer.process.send_signal(signal.SIGCONT)
    assert_untouched(owner, 88)
    other.submit(send(1, [5], [6]))
    assert other.next().error is None
    assert (owner.pool[6] == 2).all()
    assert (np.delete(owner.pool[1:], 5, axis=0) == 88).all()


def test_a_cancel_ends_with_what_is_under_way(start):
    writer, owner = start("P"), start("D")
    connect(writer, owner)
    writer.submit(send(1, ALL, ALL, last=False), CancelSend(named(1)))
    ended = writer.next()
    assert (ended.cancelled, ended.error) == (True, None)
    assert_untouched(owner, 99)


def test_an_owner_that_starts_anew_is_another(start):
    writer, owner = start("P"), start("D")
    connect(writer, owner)
    metadata = owner.metadata
    owner.process.kill()
    assert writer.next(5) == PeerLinkDown("D", 1)
    again = start("D")
    writer.submit(ConnectPeer("D", 2, metadata))
    assert writer.next().error
    connect(writer, again, 3)
    writer.submit(send(1, [5], [6]))
    assert writer.next().error is None
    assert (again.pool[6] == 1).all()


def test_links_that_come_and_go_leave_nothing_behind(start):
    writer, owner = start("P"), start("D")

    def held():
        """Return the numbers of descriptors and threads of both processes."""
        return [
            len(os.listdir(f"/proc/{child.process.pid}/{kind}")) for child in (writer, owner) for kind in ("fd", "task")
        ]

    before = None
    for link in range(1, 13):
        connect(writer, owner, link)
        writer.submit(send(link, [5], [6]))
        assert writer.next().error is None
        writer.submit(DisconnectPeer("D", link))
        assert [writer.next(), owner.next()] == [PeerLinkDown("D", link), PeerLinkDown("P", link)]
        if link == 3:
            before = held()

    # The libraries end a link's threads and connections in the background, so the first count may hold some of them
    # and the last one may have to wait. Whatever stays behind stays nine times, which is more.
    def nothing_more():
        return all(now <= then for now, then in zip(held(), before, strict=True))

    wait_until(nothing_more, 20, "descriptors and threads of closed links are released")
