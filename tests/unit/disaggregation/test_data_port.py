"""Strangers at a worker's data port: resets at any moment, descriptors that run out, idle crowds, forged batches."""

from __future__ import annotations

import contextlib
import errno
import resource
import socket
import struct
import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from support.handovers import named, write_of
from support.machine import limit
from support.processes import wait_until

from pdserve.disaggregation.transfer.backends import page_stream, peer_links, tcp
from pdserve.disaggregation.transfer.backends.base import LinkDown, LinkUp, WriteState
from pdserve.disaggregation.transfer.backends.grants import Writer
from pdserve.disaggregation.transfer.backends.handshake import LENGTH, Greeting, Offer, OfferedGroup, frame
from pdserve.disaggregation.transfer.backends.link import LinkPhase
from pdserve.disaggregation.transfer.backends.page_stream import ANSWER, BATCH
from pdserve.disaggregation.transfer.backends.shm import ShmBackend
from pdserve.disaggregation.transfer.backends.socket_backend import MAX_STRANGERS
from pdserve.disaggregation.transfer.backends.tcp import TcpBackend
from pdserve.disaggregation.wire.listener import ACCEPT_PAUSE_SECONDS
from pdserve.mem_cache.kv_pages.page_group import PageGroup
from pdserve.mem_cache.kv_pages.region import allocate_region

PAGE, PAGES = 4096, 8
LIMIT = limit(10.0)
RST = struct.pack("ii", 1, 0)
BACKENDS = {"tcp": TcpBackend, "shm": ShmBackend}


class Node:
    """A backend over a pool filled with one byte."""

    def __init__(self, kind, epoch, fill=0, **timeouts):
        self.region = allocate_region(PAGE * PAGES, shared=kind == "shm")
        self.pool = np.frombuffer(self.region.buffer, dtype=np.uint8)
        self.pool[:] = fill
        self.backend = BACKENDS[kind](epoch, "127.0.0.1", **timeouts)
        self.metadata = self.backend.register([PageGroup(self.region, PAGE)])
        self.offer = msgspec.msgpack.decode(self.metadata, type=Offer)
        self.backend.grant("P", named(1), np.arange(1, PAGES, dtype=np.int32))
        self.events = []

    def turn(self):
        self.events += self.backend.progress(0.001)

    def stranger(self):
        """Open a connection to this node."""
        if self.offer.backend == "tcp":
            return socket.create_connection((self.offer.place, self.offer.port), LIMIT)
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(LIMIT)
        sock.connect(f"\0{self.offer.place}")
        return sock

    @property
    def strangers(self):
        return sum(link.phase is LinkPhase.GREETING for link in self.backend._links)


def until(nodes, condition, what):
    def turned():
        for node in nodes:
            node.turn()
        return condition()

    wait_until(turned, LIMIT, what)


@pytest.fixture
def make_node():
    nodes = []

    def make(*args, **kwargs):
        nodes.append(Node(*args, **kwargs))
        return nodes[-1]

    yield make
    for node in nodes:
        node.backend.close()


@pytest.fixture(params=["tcp", "shm"])
def kind(request):
    return request.param


def reset(sock):
    """Close by RST, where there is such a thing."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST)
    sock.close()


def assert_serves(make_node, node, kind):
    """Assert that an honest writer can connect."""
    writer = make_node(kind, f"W{time.monotonic_ns()}")
    writer.backend.connect(node.offer.epoch, node.metadata)
    until((writer, node), lambda: writer.events, "an answer")
    assert writer.events == [LinkUp(node.offer.epoch)]


@pytest.mark.parametrize("good_secret", [False, True])
def test_a_greeting_with_a_reset_after_it_does_no_harm(make_node, kind, good_secret):
    node = make_node(kind, "D")
    for _ in range(20):
        sock = node.stranger()
        secret = node.offer.secret if good_secret else b"wrong"
        sock.sendall(frame(Greeting(1, "P", "D", secret)))
        reset(sock)
        node.turn()
    until((node,), lambda: not node.backend._links, "all are gone")
    assert_serves(make_node, node, kind)


class BrokenPipe:
    """A socket on which every call but reading fails, as if it had been reset at that moment."""

    def __init__(self, sock):
        self._sock = sock

    def __getattr__(self, name):
        if name in ("send", "sendmsg", "setsockopt", "getsockopt"):
            return self._fail
        return getattr(self._sock, name)

    def _fail(self, *args):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_a_verdict_that_cannot_be_sent_ends_its_connection_only(make_node, kind):
    node = make_node(kind, "D")
    sock = node.stranger()
    until((node,), lambda: node.strangers == 1, "it was accepted")
    (link,) = node.backend._links
    link.stream.sock = BrokenPipe(link.stream.sock)
    node.backend._reactor.forget = lambda sock: None
    sock.sendall(frame(Greeting(1, "P", "D", b"wrong")))
    until((node,), lambda: not node.backend._links, "it is gone")
    assert node.events == []
    sock.close()


def test_a_connection_reset_before_it_is_accepted_does_no_harm(make_node):
    node = make_node("tcp", "D")
    for _ in range(20):
        reset(node.stranger())
    for _ in range(25):
        node.turn()
    until((node,), lambda: not node.backend._links, "all are gone")
    assert_serves(make_node, node, "tcp")


def test_a_connection_that_cannot_be_set_up_is_dropped(make_node, monkeypatch):
    node = make_node("tcp", "D")

    def fail(sock):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(node.backend, "_tune", fail)
    with node.stranger() as sock:
        until((node,), lambda: node.backend._refusals.total == 1, "it was refused")
        assert sock.recv(1) == b""


def test_without_descriptors_the_listener_rests_and_then_goes_on(make_node, kind):
    node = make_node(kind, "D")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    waiting = node.stranger()
    used = max(waiting.fileno(), node.backend._port.listener.sock.fileno())
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, hard))
    filler = []
    try:
        with contextlib.suppress(OSError):
            while True:
                filler.append(socket.socket())
        node.turn()
        assert (node.strangers, node.backend._refusals.total) == (0, 1)
        began = time.monotonic()
        turns = 0
        while time.monotonic() - began < ACCEPT_PAUSE_SECONDS / 2:
            node.events += node.backend.progress(0.01)
            turns += 1
        assert turns < 20  # it slept, although a connection waits all the time
    finally:
        for sock in filler:
            sock.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    until((node,), lambda: node.strangers == 1, "the one that waited is accepted")
    waiting.close()
    assert_serves(make_node, node, kind)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EPROTO])
def test_no_error_of_accept_escapes(make_node, number):
    node = make_node("tcp", "D")
    real = node.backend._port.listener.sock
    failing = SimpleNamespace(accept=lambda: (_ for _ in ()).throw(OSError(number, "no")), fileno=real.fileno)
    node.backend._port.listener.sock = failing
    with node.stranger():
        until((node,), lambda: node.backend._refusals.total, "it was tried")
        node.backend._port.listener.sock = real
        until((node,), lambda: node.strangers == 1, "it is accepted later")


def test_closing_while_the_listener_rests(make_node):
    node = Node("tcp", "D")
    real = node.backend._port.listener.sock
    node.backend._port.listener.sock = SimpleNamespace(
        accept=lambda: (_ for _ in ()).throw(OSError(errno.EMFILE, "no")), fileno=real.fileno, close=real.close
    )
    with node.stranger():
        until((node,), lambda: node.backend._refusals.total, "it was tried")
    node.backend.close()
    assert real.fileno() == -1


def test_an_idle_crowd_does_not_lock_out_an_honest_writer(make_node, kind):
    node = make_node(kind, "D")
    crowd = []
    for _ in range(2 * MAX_STRANGERS):
        crowd.append(node.stranger())
        node.turn()
    until((node,), lambda: node.strangers == MAX_STRANGERS, "the crowd is at its limit")
    assert_serves(make_node, node, kind)
    crowd[0].settimeout(LIMIT)
    assert crowd[0].recv(1) == b""  # the oldest was dropped
    crowd[-1].setblocking(False)
    with pytest.raises(BlockingIOError):
        crowd[-1].recv(1)  # the newest may stay a while
    for sock in crowd:
        sock.close()


def test_writers_that_are_dialled_do_not_count_as_strangers(make_node):
    """A prefill that reaches out to many decodes at once still takes connections."""
    node = make_node("tcp", "P", handshake_seconds=30)
    with socket.create_server(("127.0.0.1", 0), backlog=200) as silent:
        for i in range(MAX_STRANGERS + 5):
            offer = Offer("tcp", f"D{i}", b"x", [OfferedGroup(PAGES, PAGE, 1)], "127.0.0.1", silent.getsockname()[1])
            node.backend.connect(f"D{i}", msgspec.msgpack.encode(offer))
        with node.stranger():
            until((node,), lambda: any(k.peer == "" for k in node.backend._links), "the connection is taken")
    assert sum(k.peer != "" for k in node.backend._links) == MAX_STRANGERS + 5  # and none of them made way for it
    assert node.events == []


def test_a_stranger_has_so_long_however_it_drips(make_node):
    node = make_node("tcp", "D", handshake_seconds=0.3)
    body = frame(Greeting(1, "P", "D", b"wrong"))
    with node.stranger() as sock:
        for i in range(len(body) - 1):
            sock.send(body[i : i + 1])
            next_byte = time.monotonic() + 0.03
            while time.monotonic() < next_byte:
                node.events += node.backend.progress(0.01)
            if i and not node.backend._links:
                break
        assert i < len(body) - 2


@pytest.mark.parametrize(
    "body",
    [b"\x81\xa1\xff\x01", b"\x91" * 4096, b"\xdd\xff\xff\xff\xff", b"\x84\xa7version\xa1\xff", b"\x80"],
)
def test_greetings_that_are_none(make_node, kind, body):
    node = make_node(kind, "D")
    with node.stranger() as sock:
        sock.sendall(LENGTH.pack(len(body)) + body)
        until((node,), lambda: node.backend._refusals.total == 1, "it was refused")
    assert (node.events, node.backend._links) == ([], set())


def batch(number, *pages, room=1):
    """Return the head of a batch of whole pages."""
    return BATCH.pack(number, room, 1, 0, 0, 1, len(pages)) + np.array(pages, dtype="<i4").tobytes()


@pytest.mark.parametrize("pages", [[0], [1, 0], [-1], [PAGES]])
def test_page_0_is_not_written_whatever_a_writer_says(make_node, pages):
    writer, receiver = make_node("tcp", "P", 1), make_node("tcp", "D", 2)
    writer.backend.connect("D", receiver.metadata)
    until((writer, receiver), lambda: writer.events == [LinkUp("D")], "the link is up")
    (link,) = writer.backend._links
    raw = link.stream.sock
    raw.setblocking(True)
    raw.settimeout(LIMIT)
    writer.backend._reactor.forget(raw)
    writer.backend._links.clear()
    raw.sendall(batch(7, *pages) + b"\3" * PAGE * len(pages))
    raw.sendall(batch(8, 5) + b"\1" * PAGE)
    until((receiver,), lambda: int((receiver.pool == 1).sum()) == PAGE, "the good batch has landed")
    assert int((receiver.pool == 2).sum()) == PAGE * (PAGES - 1)
    until((receiver,), lambda: raw.recv(2 * ANSWER.size, socket.MSG_PEEK) and True, "answers")
    answers = raw.recv(2 * ANSWER.size, socket.MSG_WAITALL)
    assert list(ANSWER.iter_unpack(answers)) == [(7, 0), (8, 1)]
    raw.close()


def test_a_writer_that_reads_no_answers_is_dropped(make_node, monkeypatch):
    monkeypatch.setattr(page_stream, "MAX_UNREAD_ANSWERS", 50)
    monkeypatch.setattr(tcp.TcpBackend, "_accepted", shrunk(tcp.TcpBackend._accepted))
    writer, receiver = make_node("tcp", "P", 1), make_node("tcp", "D", 2)
    writer.backend.connect("D", receiver.metadata)
    until((writer, receiver), lambda: writer.events == [LinkUp("D")], "the link is up")
    (link,) = writer.backend._links
    unknown = batch(1, PAGES) + b"\1" * PAGE

    def flood():
        try:
            link.stream.sock.send(unknown * 50)
        except BlockingIOError:
            pass
        except OSError:
            return True
        return bool(receiver.events)

    until((receiver,), flood, "the link ends")
    until((receiver,), lambda: receiver.events, "it is reported")
    assert isinstance(receiver.events[0], LinkDown)
    assert "does not read" in receiver.events[0].reason


def shrunk(accepted):
    """Wrap ``accepted`` so that connections have little room for answers."""

    def wrap(self, sock):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
        return accepted(self, sock)

    return wrap


def test_fences_are_bounded(make_node, monkeypatch):
    monkeypatch.setattr(peer_links, "MAX_FENCED", 10)
    node = make_node("tcp", "P")
    for i in range(50):
        node.backend.disconnect(f"D{i}")
    assert list(node.backend._fenced._epochs) == [f"D{i}" for i in range(40, 50)]


def test_a_write_still_lands(make_node, kind):
    writer, receiver = make_node(kind, "P", 1), make_node(kind, "D", 2)
    writer.backend.connect("D", receiver.metadata)
    until((writer, receiver), lambda: writer.events == [LinkUp("D")], "the link is up")
    handle = writer.backend.write(write_of([1], [1]))
    until((writer, receiver), lambda: handle.state is not WriteState.PENDING, "it has landed")
    assert (receiver.pool[PAGE : 2 * PAGE] == 1).all()


# --- grants ---


def pages(*numbers):
    return np.array(numbers, dtype=np.int32)


@pytest.fixture
def linked(make_node):
    """Make a writer and a receiver over tcp. Hand-over 1 may write pages 2 and 3."""
    writer, receiver = make_node("tcp", "P", 1), make_node("tcp", "D", 2, stall_seconds=0.5)
    writer.backend.connect("D", receiver.metadata)
    until((writer, receiver), lambda: writer.events == [LinkUp("D")], "the link is up")
    receiver.backend.revoke("P", named(1))
    receiver.backend.grant("P", named(1), pages(2, 3))
    return writer, receiver


def test_granted_pages_are_written_and_no_others(linked):
    writer, receiver = linked
    good = writer.backend.write(write_of([1, 1], [2, 3]))
    until(linked, lambda: good.state is WriteState.DONE, "it has landed")
    assert (receiver.pool.reshape(PAGES, PAGE)[2:4] == 1).all()
    bad = writer.backend.write(write_of([1, 1], [3, 4]))  # 4 is not granted
    until(linked, lambda: bad.state is WriteState.FAILED, "it was given up")
    until(linked, lambda: any(isinstance(e, LinkDown) for e in receiver.events), "the link is down")
    assert "was not asked for" in receiver.events[-1].reason
    assert (receiver.pool.reshape(PAGES, PAGE)[4:] == 2).all()


def test_a_write_that_is_quicker_than_its_grant_waits_for_it(linked):
    writer, receiver = linked
    early = writer.backend.write(write_of([1], [5], room=2))
    behind = writer.backend.write(write_of([1], [2]))
    (link,) = receiver.backend._links
    until(linked, lambda: link.paused, "the header has come")
    for _ in range(20):
        writer.turn()
        receiver.turn()
    assert (receiver.pool == 2).all()
    receiver.backend.grant("P", named(2), pages(6))
    receiver.backend.grant("P", named(1), pages(5))
    assert link.paused
    receiver.backend.grant("P", named(2), pages(5))
    until(linked, lambda: behind.state is WriteState.DONE, "both have landed")
    assert early.state is WriteState.DONE
    assert (receiver.pool.reshape(PAGES, PAGE)[[2, 5]] == 1).all()
    assert not receiver.events


def test_what_was_revoked_or_is_anothers_is_not_written(linked, make_node):
    writer, receiver = linked
    receiver.backend.grant("P", named(2), pages(5))
    receiver.backend.grant("Q", named(1), pages(3))
    (pool,) = receiver.backend._receive_buffers.pools
    covers = pool.grants.covers
    assert covers(Writer("P", 1, 1), pages(2))
    assert not covers(Writer("P", 1, 1), pages(2, 3))
    receiver.backend.revoke("P", named(1))
    for page in (2, 3, 5):
        assert not covers(Writer("P", 1, 1), pages(page))
    assert covers(Writer("Q", 1, 1), pages(3))  # and not taken from Q when P's was revoked
    assert not covers(Writer("Q", 1, 1), pages(3, 4))
    assert not covers(Writer("Q", 1, 2), pages(3))
    assert covers(Writer("P", 2, 1), pages(5))
    late = writer.backend.write(write_of([1], [2]))
    until(linked, lambda: late.state is WriteState.FAILED, "it was given up")
    assert (receiver.pool == 2).all()


def test_a_peer_that_dies_while_it_waits_for_a_grant_costs_no_time_of_others(linked, make_node):
    writer, receiver = linked
    writer.backend.write(write_of([1], [5]))
    (link,) = receiver.backend._links
    until(linked, lambda: link.paused, "the header has come")
    for outgoing in writer.backend._links:
        outgoing.stream.sock.shutdown(socket.SHUT_RDWR)
    turns = 0
    began = time.monotonic()
    while not receiver.events:
        receiver.events += receiver.backend.progress(1.0)
        turns += 1
        assert time.monotonic() - began < LIMIT
    assert turns < 10  # it slept


@pytest.mark.parametrize("how", ["half", "all but a byte"])
def test_revoking_ends_who_is_in_the_middle_of_writing(linked, how):
    """The pages belong to another request from now on."""
    writer, receiver = linked
    (link,) = writer.backend._links
    raw = link.stream.sock
    raw.setblocking(True)
    writer.backend._reactor.forget(raw)
    writer.backend._links.clear()
    sent = PAGE // 2 if how == "half" else PAGE - 1
    raw.sendall(batch(7, 2) + b"\1" * sent)
    (reader,) = receiver.backend._links
    until((receiver,), lambda: receiver.pool[2 * PAGE + sent - 1] == 1, "most has come")
    receiver.backend.grant("P", named(2), pages(4))
    receiver.backend.revoke("P", named(2))
    assert reader.phase is LinkPhase.OPEN
    receiver.backend.revoke("P", named(1))
    until((receiver,), lambda: receiver.events, "the link is down")
    assert "may not write any more" in receiver.events[0].reason
    receiver.pool[:] = 9
    with contextlib.suppress(OSError):
        raw.sendall(b"\1" * PAGE)
    for _ in range(20):
        receiver.turn()
    assert (receiver.pool == 9).all()
    raw.close()
