"""The transfer engine's time: fair shares of a slow backend, cancels between writes, failures, and sleep."""

from __future__ import annotations

import threading

import pytest
from support.handovers import named
from support.transfer_node import PAGE, PAGES, send, summed

from pdserve.disaggregation.errors import NotConnected
from pdserve.disaggregation.transfer import engine, push_queue
from pdserve.disaggregation.transfer.backends.base import (
    Capabilities,
    Completion,
    LinkDown,
    LinkUp,
    TransferBackend,
    WriteHandle,
    WriteState,
)
from pdserve.disaggregation.transfer.engine import TransferEngine
from pdserve.mem_cache.kv_pages.page_group import PageGroup
from pdserve.mem_cache.kv_pages.region import allocate_region
from pdserve.messages.worker import (
    CancelSend,
    ConnectPeer,
    PeerConnected,
    PeerLinkDown,
    SendEnded,
)


@pytest.mark.parametrize("completion", [Completion.POLLED, Completion.DRIVEN])
def test_a_peer_that_stands_still_costs_no_core(completion):
    """A write that no event announces is polled without a pause, as long as it may land at any moment."""
    clock = [100.0]
    backend = SlowBackend(completion)
    region = allocate_region(PAGE * PAGES, shared=False)
    made = TransferEngine(
        backend, [PageGroup(region, PAGE)], "P", "127.0.0.1", lambda event: None, clock=lambda: clock[0]
    )
    made._pushes.use_link("D", 1)
    made.submit(send(1, [1], [2]))
    made.turn(wait=False)
    assert made._pause() == 0.0
    clock[0] += engine.BRISK_SECONDS * 1.1
    assert made._pause() == engine.POLL_SECONDS
    made.close()


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
    """An engine with slices of 4 pages and a window of 8. Writes of its backend land on demand."""
    monkeypatch.setattr(push_queue, "SLICE_BYTES", 4 * PAGE)
    monkeypatch.setattr(push_queue, "WINDOW_BYTES", 8 * PAGE)
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
