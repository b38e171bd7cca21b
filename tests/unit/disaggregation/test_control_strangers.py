"""Strangers at a control port, and peers that misbehave: what they cost, and which connections stay unharmed."""

from __future__ import annotations

import contextlib
import resource
import select
import socket
import tracemalloc

import pytest
from support.control_wire import ControlSocket, framed
from support.dialled import Dialled
from support.handovers import named
from support.machine import limit
from support.processes import wait_until

from pdserve.disaggregation.handover.control import port as control_port
from pdserve.disaggregation.handover.control.frames import LENGTH, SHORT_FRAME_BYTES, greeting
from pdserve.disaggregation.handover.control.port import MAX_STRANGERS, STRANGER_BYTES, ControlPort
from pdserve.messages.channel import encode
from pdserve.messages.handover import MAX_PAGES, Heartbeat, RoomQueued, TransferFailed, TransferRequest

LIMIT = limit(10.0)
BEAT = encode([Heartbeat("P")])


@pytest.fixture
def server():
    server = ControlPort("127.0.0.1")
    yield server
    server.close()


@pytest.fixture
def connect(server):
    """Makes strangers."""
    with contextlib.ExitStack() as stack:

        def make(**how):
            stranger = ControlSocket(server.port, **how)
            stack.callback(stranger.close)
            return stranger

        yield make


def turn(server):
    """Return everything that one tick reads."""
    return list(iter(server.recv, None))


def until(server, condition, what="it has come to pass"):
    """Turns until then; what they read."""
    frames = []

    def turned():
        frames.extend(turn(server))
        return condition()

    wait_until(turned, LIMIT, what)
    return frames


def first(server):
    """Return the next frame."""
    frames = []
    wait_until(lambda: frames.append(server.recv()) or frames[-1], LIMIT, "a frame has come")
    return frames[-1]


def become_peer(server, stranger):
    stranger.send(BEAT)
    identity, _ = first(server)
    server.keep(identity)
    return server._peers[identity]


def readable(server):
    return bool(select.select([server], [], [], 0)[0])


# --- what it costs ---


def test_a_length_that_was_announced_costs_nothing_until_bytes_come(server, connect):
    stranger = connect()
    peer = become_peer(server, stranger)
    turn(server)
    tracemalloc.start()
    stranger.send_bytes(LENGTH.pack(SHORT_FRAME_BYTES))
    until(server, lambda: peer.held > 0, "the length was read")
    assert peer.held <= 4096
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()
    for count in range(1, 11):
        stranger.send_bytes(bytes(50_000))
        until(server, lambda: not readable(server), "it was read")
        assert peer.held <= 2 * count * 50_000 + 4096
    assert peer.held > 250_000


def test_strangers_may_not_announce_much_at_all(server, connect, caplog):
    stranger = connect()
    stranger.send_bytes(LENGTH.pack(STRANGER_BYTES + 1))
    until(server, stranger.has_ended)
    assert server.connections == 0
    assert f"announced a frame of {STRANGER_BYTES + 1} bytes" in caplog.text


def test_the_longest_frame_of_an_honest_peer_is_taken(server):
    client = Dialled("127.0.0.1", server.port)
    client.send([Heartbeat("P")])
    server.keep(first(server)[0])
    longest = TransferRequest(
        "P" * 128, named((1 << 63) - 1, (1 << 63) - 1, "D" * 128), 1, 1, 1, [bytes(4 * MAX_PAGES)]
    )
    assert client.send([longest]) == []
    frames = until(server, lambda: client.recv() or (not client.connection.unsent and not readable(server)))
    assert [messages for _, messages in frames] == [[longest]]
    client.close()


def test_only_so_many_strangers_wait_and_the_oldest_goes(server, connect):
    oldest = connect()
    until(server, lambda: server.connections == 1)
    crowd = []
    for _ in range(2 * MAX_STRANGERS):
        crowd.append(connect(greet=False))
        turn(server)
    until(server, lambda: server.connections == MAX_STRANGERS)
    assert oldest.has_ended()
    assert not crowd[-1].has_ended()
    newest = connect()
    newest.send(BEAT)
    assert until(server, lambda: not readable(server)) or first(server)


def test_a_crowd_that_comes_does_not_push_out_a_stranger_whose_hello_has_come(server, connect, monkeypatch):
    monkeypatch.setattr(control_port, "MAX_STRANGERS", 2)
    honest = connect()
    until(server, lambda: server.connections == 1)
    honest.send(BEAT)
    crowd = [connect(greet=False) for _ in range(10)]
    wait_until(lambda: readable(server), LIMIT, "all wait")
    honest.wait_delivered()
    _, messages = server.recv()
    assert messages == [Heartbeat("P")]
    assert crowd


def test_who_says_no_hello_is_hung_up_on(server, connect, monkeypatch):
    monkeypatch.setattr(control_port, "STRANGER_SECONDS", 0.3)
    silent, talking, kept = connect(greet=False), connect(), connect()
    become_peer(server, kept)

    def talk():
        with contextlib.suppress(OSError):
            talking.send(BEAT)  # beats, but says no Hello
        return silent.has_ended() and talking.has_ended()

    until(server, talk, "both are gone")
    assert not kept.has_ended()
    assert server.connections == 1
    assert server.take_ended() == []


def test_a_peer_that_does_not_read_is_ended(server, connect, monkeypatch):
    monkeypatch.setattr(control_port, "UNREAD_BYTES", 1 << 20)
    peer = become_peer(server, connect())
    message = TransferFailed("D", named(1), 500, "x" * 2000)
    most = 0
    for _ in range(20_000):
        server.send(peer.identity, [message] * 100)
        most = max(most, peer.unsent)
        if peer.closed:
            break
    assert most <= (1 << 20) + 250_000
    ((identity, reason),) = server.take_ended()
    assert identity == peer.identity
    assert "does not read" in reason
    assert server.send(identity, [message]) == []


def test_those_that_do_not_read_share_a_limit_and_the_one_that_is_stuck_longest_goes(server, connect, monkeypatch):
    monkeypatch.setattr(control_port, "UNREAD_BYTES_IN_ALL", 3 << 20)
    peers = [become_peer(server, connect()) for _ in range(3)]
    message = TransferFailed("D", named(1), 500, "x" * 2000)
    for peer in peers:
        while peer.unsent < 1 << 20 and not peer.closed:
            server.send(peer.identity, [message] * 100)
    assert [peer.closed for peer in peers] == [True, False, False]
    assert sum(peer.unsent for peer in peers[1:]) <= (3 << 20)


# --- whom it can't harm ---


def test_one_that_floods_does_not_starve_another(server, connect):
    flooding, honest = connect(), connect()
    become_peer(server, flooding)
    become_peer(server, honest)
    flood = framed(BEAT) * 5000
    flooding.sock.settimeout(0.2)
    with contextlib.suppress(TimeoutError):
        flooding.send_bytes(flood)
    honest.send(encode([RoomQueued("P", named(7))]))
    wait_until(lambda: readable(server), LIMIT, "both have come")
    honest.wait_delivered()
    frames = [server.recv()[1] for _ in range(2 + control_port.AGAIN_A_ROUND)]
    assert [RoomQueued("P", named(7))] in frames[:2]
    honest.send(encode([RoomQueued("P", named(8))]))
    honest.wait_delivered()
    frames = [server.recv()[1] for _ in range(3 + control_port.AGAIN_A_ROUND)]
    assert [RoomQueued("P", named(8))] in frames


def test_a_tick_ends_although_all_connections_drip(server, monkeypatch):
    monkeypatch.setattr(control_port, "TURN_BYTES", 100 * control_port.SERVE_COST)
    assert turn(server) == []
    looks = 0

    class Endless:
        """Brings a byte whenever it is looked at."""

        closed = False
        identity = 1

        def read(self, budget):
            nonlocal looks
            looks += 1
            return None, 1

    monkeypatch.setattr(server, "_begin_round", lambda: server._ready.extend([(Endless(), True, False)] * 1000))
    assert server.recv() is None
    assert 90 <= looks <= 100


def test_a_hello_that_comes_byte_by_byte_is_a_hello(server, connect):
    stranger = connect(greet=False)
    for byte in greeting() + framed(BEAT):
        stranger.send_bytes(bytes([byte]))
        if frames := turn(server):
            break
    assert (frames or [first(server)])[0][1] == [Heartbeat("P")]


@pytest.mark.parametrize(
    "data",
    [
        b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32),  # TLS
        b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48),  # ZMTP
        b"SSH-2.0-OpenSSH_9.6\r\n",
    ],
)
def test_other_protocols_are_hung_up_on_at_once(server, connect, caplog, data):
    stranger = connect(greet=False)
    stranger.send_bytes(data)
    until(server, stranger.has_ended)
    (record,) = caplog.records
    assert "from 127.0.0.1" in record.getMessage()
    assert "does not speak pdserve's control protocol" in record.getMessage()


def test_another_version_is_told_apart_at_both_ends(server, connect, caplog):
    connect(greet=False).send_bytes(greeting(version=9))
    until(server, lambda: server.refusals.total)
    assert "speaks version 9 of the control channel, this instance 2; run the same pdserve" in caplog.text
    with socket.create_server(("127.0.0.1", 0)) as newer:
        client = Dialled("127.0.0.1", newer.getsockname()[1])
        sock, _ = newer.accept()
        with sock:
            sock.sendall(greeting(version=9))
            wait_until(lambda: client.recv() is None and client.ended, LIMIT, "the client has seen it")
        client.close()
    assert "run the same pdserve on both sides" in client.ended


def test_without_descriptors_the_port_rests_and_then_goes_on(server, connect):
    kept = connect()
    peer = become_peer(server, kept)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    waiting = connect()
    highest = waiting.sock.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    filler = []
    try:
        with contextlib.suppress(OSError):
            while True:
                filler.append(socket.socket())
        until(server, lambda: server.refusals.total == 1, "it was tried")
        assert server.connections == 1
        assert not readable(server)  # although a connection waits: the loop can sleep
        kept.send(BEAT)
        assert first(server) == (peer.identity, [Heartbeat("P")])
    finally:
        for sock in filler:
            sock.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    until(server, lambda: server.connections == 2, "the one that waited is accepted")


def test_thousands_of_connections_and_resets_leave_nothing_behind(server, connect):
    kept = connect()
    become_peer(server, kept)
    for i in range(2000):
        stranger = ControlSocket(server.port, greet=i % 3 > 0)
        with contextlib.suppress(OSError):
            stranger.send_bytes([b"", framed(BEAT), framed(BEAT)[:-3]][i % 3])
        stranger.close(linger=0 if i % 2 else None)
        if i % 20 == 0:
            until(server, lambda: not readable(server))
            assert server.connections <= MAX_STRANGERS + 1
    until(server, lambda: server.connections == 1, "all but the peer are gone")
    assert not kept.has_ended()


# --- how connections end ---


def test_a_peer_that_hangs_up_is_reported_after_all_that_it_said(server, connect):
    stranger = connect()
    peer = become_peer(server, stranger)
    for room in range(10):
        stranger.send(encode([RoomQueued("P", named(room))]))
    stranger.sock.shutdown(socket.SHUT_WR)
    rooms = []
    while len(rooms) < 10:
        assert server.take_ended() == []
        frame = server.recv()
        rooms += [message.handover.room for message in frame[1]] if frame else []
    until(server, lambda: peer.closed)
    ((identity, reason),) = server.take_ended()
    assert (identity, reason) == (peer.identity, "the peer closed the connection")


@pytest.mark.parametrize(("words", "answers"), [(1, 2), (200, 0)])
def test_what_was_sent_right_before_the_end_arrives(server, words, answers):
    """More than the reader's kernel takes at once, too; and although the reader itself writes in vain by then."""
    client = Dialled("127.0.0.1", server.port)
    client.send([Heartbeat("P")])
    identity, _ = first(server)
    server.keep(identity)
    client.send([Heartbeat("P")] * 100)  # unread at the end, which would make it a reset
    wait_until(lambda: readable(server), LIMIT, "they are there")
    last = [TransferFailed("D", named(room), 500, "last words" * 200) for room in range(words)]
    server.send(identity, last)
    assert server._peers[identity].unsent == 0
    server.drop(identity)
    for _ in range(answers):
        client.send([Heartbeat("P")])
    frames = []
    wait_until(lambda: frames.append(client.recv()) or client.ended, LIMIT, "the end has come")
    assert [message for frame in frames if frame for message in frame] == last
    client.close()


def test_an_unreachable_port_is_an_error_that_names_the_address():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        client = Dialled("127.0.0.1", port)
        wait_until(lambda: client.recv() is None and client.ended, LIMIT, "it is refused")
        client.close()
    assert client.ended == (
        f"its control port at 127.0.0.1:{port} can't be used: the connection broke: Connection refused"
    )


def test_one_that_does_not_greet_is_given_up(monkeypatch):
    monkeypatch.setattr(control_port, "DIAL_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = Dialled("127.0.0.1", silent.getsockname()[1])
        wait_until(lambda: client.recv() is None and client.ended, LIMIT, "it gives up")
    assert "does not answer (for 0.2 s)" in client.ended
    assert not select.select([client.port], [], [], 0)[0]
    client.close()


def test_names_are_not_looked_up_here():
    with pytest.raises(ValueError, match="localhost"):
        Dialled("localhost", 1)


def test_ipv6():
    server = ControlPort("::1")
    client = Dialled("::1", server.port)
    client.send([Heartbeat("P")])
    identity, messages = first(server)
    assert messages == [Heartbeat("P")]
    server.send(identity, [Heartbeat("D")])
    frames = []
    wait_until(lambda: frames.append(client.recv()) or frames[-1], LIMIT, "the answer is there")
    assert frames[-1] == [Heartbeat("D")]
    client.close()
    server.close()
