"""Links and writes of the backends that move bytes, driven by hand: no engine, no threads."""

from __future__ import annotations

import fcntl
import os
import socket
import time

import msgspec
import numpy as np
import pytest
from support import fake_cuda_driver
from support.handovers import named, write_of
from support.machine import limit
from support.staged_pools import pool_group

from pdserve.disaggregation.errors import BadPages, NotConnected, UnknownBackend
from pdserve.disaggregation.transfer.backends import tcp
from pdserve.disaggregation.transfer.backends.base import (
    Admitted,
    ConnectFailed,
    LinkDown,
    LinkUp,
    WriteState,
)
from pdserve.disaggregation.transfer.backends.fake import FakeBackend
from pdserve.disaggregation.transfer.backends.handshake import LENGTH, GreetingAnswer, Offer, OfferedGroup, frame
from pdserve.disaggregation.transfer.backends.load import find_backend, make_backend
from pdserve.disaggregation.transfer.backends.page_stream import BATCH
from pdserve.disaggregation.transfer.backends.receive_buffers import MAX_PAGES
from pdserve.disaggregation.transfer.backends.shm import ShmBackend
from pdserve.disaggregation.transfer.backends.tcp_address import reachable_address
from pdserve.disaggregation.transfer.backends.unix_address import host_id
from pdserve.mem_cache.kv_pages.page_group import PageGroup
from pdserve.mem_cache.kv_pages.region import RegionError, allocate_region

PAGE = 4096
PAGES = 8
LAYERS = 4
LIMIT = limit(10.0)


class Node:
    """A backend over a pool filled with one byte."""

    def __init__(self, kind, epoch, fill=0, host="127.0.0.1", pages=PAGES, **timeouts):
        self.region = allocate_region(PAGE * pages, shared=kind == "shm")
        self.pool = np.frombuffer(self.region.buffer, dtype=np.uint8)
        self.pool[:] = fill
        self.backend = find_backend(kind)(epoch, host, **timeouts)
        self.metadata = self.backend.register([pool_group(kind, self.region, PAGE, LAYERS)])
        self.backend.grant("P", named(1), np.arange(1, pages, dtype=np.int32))
        self.epoch = epoch
        self.events = []


def pump(nodes, until):
    """Let all nodes work until the condition holds."""
    limit = time.monotonic() + LIMIT
    while not until():
        assert time.monotonic() < limit, [node.events for node in nodes]
        for node in nodes:
            node.events += node.backend.progress(0.001)


def whole(src, dst):
    """Make a write of all layers of pages."""
    return write_of(src, dst, (0, LAYERS))


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    """Install a CUDA driver without a GPU."""
    fake_cuda_driver.install(monkeypatch)


@pytest.fixture
def make_node():
    nodes = []

    def make(*args, **kwargs):
        nodes.append(Node(*args, **kwargs))
        return nodes[-1]

    yield make
    for node in nodes:
        node.backend.close()


@pytest.fixture(params=["tcp", "shm", "cuda_ipc"])
def kind(request):
    return request.param


@pytest.fixture
def pair(make_node, kind):
    """A writer P linked to a receiver D."""
    writer, receiver = make_node(kind, "P", 1), make_node(kind, "D", 2)
    writer.backend.connect("D", receiver.metadata)
    pump((writer, receiver), lambda: writer.events == [LinkUp("D")])
    writer.events.clear()
    return writer, receiver


@pytest.mark.parametrize("layers", [(0, LAYERS), (0, 1), (1, 3), (3, 4)])
def test_layers_of_pages_land_where_they_should_and_nowhere_else(pair, layers):
    writer, receiver = pair
    writer.pool[:] = np.random.default_rng(0).integers(0, 256, len(writer.pool))
    expected = receiver.pool.copy().reshape(PAGES, LAYERS, -1)
    src, dst, part = [7, 1, 2, 3], [2, 4, 5, 1], slice(*layers)
    expected[dst, part] = writer.pool.reshape(PAGES, LAYERS, -1)[src, part]
    handle = writer.backend.write(write_of(src, dst, layers))
    pump(pair, lambda: writer.backend.poll(handle) is not WriteState.PENDING)
    assert writer.backend.poll(handle) is WriteState.DONE
    assert np.array_equal(receiver.pool, expected.reshape(-1))


def test_a_write_larger_than_all_buffers_arrives_whole(make_node, kind, monkeypatch):
    monkeypatch.setattr(tcp, "BUFFER_BYTES", 32 << 10)  # the socket takes pieces only in part
    pages = 1000
    pair = writer, receiver = make_node(kind, "P", pages=pages), make_node(kind, "D", pages=pages)
    writer.backend.connect("D", receiver.metadata)
    pump(pair, lambda: writer.events == [LinkUp("D")])
    rng = np.random.default_rng(1)
    writer.pool[:] = rng.integers(0, 256, len(writer.pool))
    src, dst = np.arange(1, pages), 1 + rng.permutation(pages - 1)
    expected = receiver.pool.copy().reshape(pages, PAGE)
    expected[dst] = writer.pool.reshape(pages, PAGE)[src]
    handle = writer.backend.write(whole(src, dst))
    pump(pair, lambda: writer.backend.poll(handle) is WriteState.DONE)
    assert np.array_equal(receiver.pool, expected.reshape(-1))


@pytest.mark.parametrize(
    "pages",
    [
        write_of([1], [PAGES], (0, LAYERS)),
        write_of([1], [-1], (0, LAYERS)),
        write_of([1], [0], (0, LAYERS)),
        write_of([PAGES], [1], (0, LAYERS)),
        write_of([0], [1], (0, LAYERS)),
        write_of([1, 2], [1], (0, LAYERS)),
        write_of([], [], (0, LAYERS)),
        write_of([1], [1], (0, LAYERS + 1)),
        write_of([1], [1], (2, 2)),
        write_of([1], [1], (-1, 1)),
        write_of([1], [1], (0, LAYERS), group=1),
        write_of([1], [1], (0, LAYERS), group=-1),
    ],
)
def test_writes_outside_of_a_pool_are_refused_before_anything_moves(pair, pages):
    writer, receiver = pair
    with pytest.raises(BadPages):
        writer.backend.write(pages)
    assert (receiver.pool == 2).all()


def test_tcp_receiver_checks_bounds_itself_and_the_link_survives(make_node):
    writer, receiver = make_node("tcp", "P", 1), make_node("tcp", "D", 2)
    offer = msgspec.msgpack.decode(receiver.metadata, type=Offer)
    lying = msgspec.structs.replace(offer, groups=[OfferedGroup(2 * PAGES, PAGE, LAYERS)])
    writer.backend.connect("D", msgspec.msgpack.encode(lying))
    pump((writer, receiver), lambda: writer.events == [LinkUp("D")])
    bad = writer.backend.write(whole([1, 2], [1, PAGES]))
    good = writer.backend.write(whole([1], [1]))
    pump((writer, receiver), lambda: good.state is not WriteState.PENDING)
    assert (bad.state, good.state) == (WriteState.FAILED, WriteState.DONE)
    assert "no such pages" in bad.error
    assert int((receiver.pool == 1).sum()) == PAGE


@pytest.mark.parametrize("theirs", [(PAGE // 2, LAYERS), (PAGE, 2)])
def test_pages_of_another_shape_are_refused(make_node, kind, theirs):
    writer, receiver = make_node(kind, "P"), make_node(kind, "D")
    offer = msgspec.msgpack.decode(receiver.metadata, type=Offer)
    other = msgspec.structs.replace(offer, groups=[OfferedGroup(PAGES, *theirs)])
    writer.backend.connect("D", msgspec.msgpack.encode(other))
    (event,) = writer.backend.progress(0)
    assert isinstance(event, ConnectFailed)
    assert "other bytes and layers" in event.error


def test_a_lost_writer_is_reported_once_and_refused_until_admitted(pair):
    writer, receiver = pair
    writer.backend.disconnect("D")
    pump(pair, lambda: writer.events and receiver.events)
    assert [type(event) for event in writer.events + receiver.events] == [LinkDown, LinkDown]
    assert receiver.events[0].peer == "P"

    writer.events.clear()
    writer.backend.connect("D", receiver.metadata)
    pump(pair, lambda: writer.events)
    assert isinstance(writer.events[0], ConnectFailed)
    assert "register with it again" in writer.events[0].error

    receiver.events.clear()
    writer.events.clear()
    receiver.backend.admit("P")
    writer.backend.connect("D", receiver.metadata)
    pump(pair, lambda: writer.events)
    assert (writer.events, receiver.events) == ([LinkUp("D")], [Admitted("P")])


def test_the_receiver_can_end_a_link_and_the_writers_writes_fail(pair):
    writer, receiver = pair
    receiver.backend.disconnect("P")
    pump(pair, lambda: writer.events and receiver.events)
    assert receiver.events == [LinkDown("P", "disconnected on request")]
    assert [event.peer for event in writer.events] == ["D"]
    with pytest.raises(NotConnected):
        writer.backend.write(whole([1], [1]))


def test_both_directions_fall_together_with_one_report_each(pair):
    one, two = pair
    two.backend.connect("P", one.metadata)
    pump(pair, lambda: two.events == [LinkUp("P")])
    two.events.clear()
    one.backend.disconnect("D")
    pump(pair, lambda: one.events and two.events)
    for node in pair:
        node.backend.progress(0)
    assert [event.peer for event in one.events + two.events] == ["D", "P"]


def test_disconnecting_an_unknown_peer_is_answered_and_keeps_it_out(make_node, kind):
    writer, receiver = make_node(kind, "P"), make_node(kind, "D")
    receiver.backend.disconnect("P")
    assert receiver.backend.progress(0) == [LinkDown("P", "disconnected on request")]
    writer.backend.connect("D", receiver.metadata)
    pump((writer, receiver), lambda: writer.events)
    assert isinstance(writer.events[0], ConnectFailed)


def test_connecting_again_is_answered_at_once(pair):
    writer, receiver = pair
    writer.backend.connect("D", receiver.metadata)
    assert writer.backend.progress(0) == [LinkUp("D")]


@pytest.mark.parametrize(
    ("change", "why"),
    [({"secret": b"x" * 16}, "secret is wrong"), ({"epoch": "old"}, "earlier life")],
)
def test_stale_and_foreign_writers_are_refused(make_node, kind, change, why):
    writer, receiver = make_node(kind, "P"), make_node(kind, "D")
    offer = msgspec.structs.replace(msgspec.msgpack.decode(receiver.metadata, type=Offer), **change)
    writer.backend.connect(offer.epoch, msgspec.msgpack.encode(offer))
    pump((writer, receiver), lambda: writer.events)
    assert isinstance(writer.events[0], ConnectFailed)
    assert why in writer.events[0].error
    assert receiver.events == []


def test_metadata_of_another_backend_or_life_says_what_to_do(make_node):
    node, shm = make_node("tcp", "P"), make_node("shm", "D")
    for peer, metadata, why in (
        ("D", shm.metadata, "the same --disaggregation-transfer-backend"),
        ("D", b"fake", "the same --disaggregation-transfer-backend"),
        ("D2", node.metadata, "has restarted"),
    ):
        node.backend.connect(peer, metadata)
        (event,) = node.backend.progress(0)
        assert isinstance(event, ConnectFailed)
        assert why in event.error


@pytest.mark.parametrize(
    "change",
    [
        {"port": 1 << 20},
        {"groups": []},
        {"groups": [OfferedGroup(-1, PAGE, LAYERS)]},
        {"place": "x" * 300},
        {"place": "\0"},
        {"place": "localhost"},
    ],
)
def test_hostile_metadata_fails_the_connect_and_nothing_else(make_node, kind, change):
    writer, receiver = make_node(kind, "P"), make_node(kind, "D")
    offer = msgspec.structs.replace(msgspec.msgpack.decode(receiver.metadata, type=Offer), **change)
    writer.backend.connect("D", msgspec.msgpack.encode(offer))
    pump((writer, receiver), lambda: writer.events)
    assert isinstance(writer.events[0], ConnectFailed)


def test_an_ended_peer_is_unreachable_with_a_hint(make_node, kind):
    writer, receiver = make_node(kind, "P"), Node(kind, "D")
    receiver.backend.close()
    writer.backend.connect("D", receiver.metadata)
    pump((writer,), lambda: writer.events)
    assert {"tcp": "loopback", "shm": "ended", "cuda_ipc": "ended"}[kind] in writer.events[0].error


def test_shm_on_another_host_says_use_tcp(make_node):
    writer, receiver = make_node("shm", "P"), make_node("shm", "D")
    offer = msgspec.msgpack.decode(receiver.metadata, type=Offer)
    elsewhere = msgspec.structs.replace(offer, place=offer.place + "-elsewhere", host_id="another")
    writer.backend.connect("D", msgspec.msgpack.encode(elsewhere))
    (event,) = writer.backend.progress(0)
    assert "--disaggregation-transfer-backend tcp" in event.error


@pytest.mark.parametrize("sealed", [True, False])
def test_a_shm_pool_that_may_shrink_is_not_mapped(make_node, sealed):
    """A process that touches memory that is gone would be killed."""
    writer = make_node("shm", "P")
    fd = os.memfd_create("pool", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, PAGE * PAGES)
    if sealed:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    place = f"test-{os.urandom(8).hex()}"
    offer = Offer("shm", "D", b"s", [OfferedGroup(PAGES, PAGE, LAYERS)], place, host_id=host_id())
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{place}")
        listener.listen()
        writer.backend.connect("D", msgspec.msgpack.encode(offer))
        accepted, _ = listener.accept()
        with accepted:
            socket.send_fds(accepted, [frame(GreetingAnswer())], [fd])
            pump((writer,), lambda: writer.events)
    os.close(fd)
    if sealed:
        assert writer.events == [LinkUp("D")]
    else:
        assert "may shrink" in writer.events[0].error


def test_shm_needs_shared_memory():
    region = allocate_region(PAGE, shared=False)
    backend = ShmBackend("P", "127.0.0.1")
    with pytest.raises(RegionError, match="shared"):
        backend.register([PageGroup(region, PAGE)])
    backend.close()
    region.close()


@pytest.mark.parametrize(
    "noise",
    [b"GET / HTTP/1.1\r\n\r\n", LENGTH.pack(5) + b"hello", LENGTH.pack(1 << 30), b"\0"],
)
def test_noise_on_the_data_port_does_no_harm(make_node, noise):
    node = make_node("tcp", "D", 2, handshake_seconds=0.2)
    offer = msgspec.msgpack.decode(node.metadata, type=Offer)
    with socket.create_connection((offer.place, offer.port)) as sock:
        sock.sendall(noise)
        sock.setblocking(False)
        closed = []

        def is_closed():
            try:
                closed.append(sock.recv(64))
            except BlockingIOError:
                return False
            except ConnectionResetError:
                return True
            return closed[-1] == b""

        pump((node,), is_closed)
    assert node.events == []
    assert (node.pool == 2).all()


@pytest.mark.parametrize(
    "batch",
    [
        (0, 1, 1, 0, 0, LAYERS, 0),
        (0, 1, 1, 0, 0, LAYERS, MAX_PAGES + 1),
        (0, 1, 1, 0, 0, LAYERS + 1, 1),
        (0, 1, 1, 0, 2, 2, 1),
        (0, 1, 1, 0, 3, 1, 1),
        (0, 1, 1, 1, 0, LAYERS, 1),
    ],
)
def test_a_malformed_batch_ends_the_link(make_node, batch):
    writer, receiver = make_node("tcp", "P", 1), make_node("tcp", "D", 2)
    writer.backend.connect("D", receiver.metadata)
    pump((writer, receiver), lambda: writer.events == [LinkUp("D")])
    link = next(iter(writer.backend._links))
    link.stream.sock.send(BATCH.pack(*batch))
    pump((writer, receiver), lambda: receiver.events)
    assert isinstance(receiver.events[0], LinkDown)
    assert "malformed" in receiver.events[0].reason
    assert (receiver.pool == 2).all()


def test_a_silent_tcp_receiver_counts_as_gone_after_stall_seconds(make_node):
    writer, receiver = make_node("tcp", "P", 1, stall_seconds=0.2), make_node("tcp", "D", 2)
    writer.backend.connect("D", receiver.metadata)
    pump((writer, receiver), lambda: writer.events == [LinkUp("D")])
    writer.events.clear()
    handle = writer.backend.write(whole([1], [1]))
    pump((writer,), lambda: writer.events)
    assert handle.state is WriteState.FAILED
    assert "does not answer" in writer.events[0].reason


def test_a_peer_that_never_answers_the_greeting_fails_the_connect(make_node, kind):
    writer, receiver = make_node(kind, "P", handshake_seconds=0.2), make_node(kind, "D")
    writer.backend.connect("D", receiver.metadata)
    pump((writer,), lambda: writer.events)
    assert "does not answer" in writer.events[0].error


def test_a_shm_writer_that_does_not_let_go_keeps_its_pages(make_node):
    pair = writer, receiver = make_node("shm", "P"), make_node("shm", "D")
    writer.backend.connect("D", receiver.metadata)
    pump(pair, lambda: writer.events == [LinkUp("D")])
    receiver.backend.disconnect("P")
    receiver.backend.admit("P")
    assert receiver.backend.progress(0) == []  # the writer has not run since: it may still write
    pump(pair, lambda: len(receiver.events) == 2)
    assert receiver.events == [LinkDown("P", "disconnected on request"), Admitted("P")]


def test_a_peer_that_is_parted_with_again_is_not_admitted_after_all(make_node):
    pair = writer, receiver = make_node("shm", "P"), make_node("shm", "D")
    writer.backend.connect("D", receiver.metadata)
    pump(pair, lambda: writer.events == [LinkUp("D")])
    for part in (receiver.backend.disconnect, receiver.backend.admit, receiver.backend.disconnect):
        part("P")
    pump(pair, lambda: receiver.events and isinstance(receiver.events[-1], LinkDown))
    why = "disconnected on request"
    assert receiver.events == [ConnectFailed("P", why), LinkDown("P", why)]
    pump(pair, lambda: isinstance(writer.events[-1], LinkDown))
    writer.backend.connect("D", receiver.metadata)
    pump(pair, lambda: isinstance(writer.events[-1], ConnectFailed))
    assert "register with it again" in writer.events[-1].error


def test_tcp_works_over_ipv6(make_node):
    if not socket.has_ipv6 or not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("this host has no IPv6")
    writer, receiver = make_node("tcp", "P", 1, host="::1"), make_node("tcp", "D", 2, host="::1")
    writer.backend.connect("D", receiver.metadata)
    pump((writer, receiver), lambda: writer.events == [LinkUp("D")])
    handle = writer.backend.write(whole([1], [1]))
    pump((writer, receiver), lambda: handle.state is WriteState.DONE)
    assert (receiver.pool[PAGE : 2 * PAGE] == 1).all()


def test_a_socket_bound_to_any_address_offers_one_that_can_be_dialled():
    assert reachable_address("127.0.0.1") == "127.0.0.1"
    assert reachable_address("0.0.0.0") != "0.0.0.0"
    assert reachable_address("::") != "::"


def test_no_descriptor_is_left_behind(kind):
    before = len(os.listdir("/proc/self/fd"))
    nodes = Node(kind, "P"), Node(kind, "D")
    nodes[0].backend.connect("D", nodes[1].metadata)
    pump(nodes, lambda: nodes[0].events)
    for node in nodes:
        node.backend.close()
        node.pool = None
        node.region.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_registry_names_the_backends():
    backend = make_backend("fake", "P", "127.0.0.1")
    assert isinstance(backend, FakeBackend)
    with pytest.raises(UnknownBackend, match="tcp, shm, nixl, mooncake, cuda_ipc, fake"):
        make_backend("rdma", "P", "127.0.0.1")
