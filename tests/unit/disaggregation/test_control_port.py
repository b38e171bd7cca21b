"""An instance's control port and its peers, with real sockets and no scheduler.

The tests show which connections become peers, which instance dials, what a tick reads, and what is kept.
"""

from __future__ import annotations

import msgspec
import pytest
import zmq
from support.control_wire import ControlSocket, framed
from support.dialled import Dialled
from support.handovers import named
from support.processes import wait_until
from support.side import LAYOUT, LIMIT, Side

from pdserve.disaggregation.handover import peers as peers_module
from pdserve.disaggregation.handover.control import port as port_module
from pdserve.disaggregation.handover.control.frames import FRAME_MESSAGES, LENGTH, MESSAGES_A_TURN, SHORT_FRAME_BYTES
from pdserve.disaggregation.handover.peer import Reading, Writing
from pdserve.messages.channel import encode
from pdserve.messages.decode import UndeclaredMessage
from pdserve.messages.handover import (
    PROTOCOL_VERSION,
    FirstToken,
    Heartbeat,
    Hello,
    Invite,
    Refused,
    RoomQueued,
    Welcome,
)
from pdserve.messages.outputs import Timing, TokenLogprob
from pdserve.messages.peer import PeerMessage
from pdserve.messages.worker import DisconnectPeer, PeerConnected, PeerLinkDown


class Port(Side):
    """A side that strangers reach."""

    def __init__(self) -> None:
        super().__init__("P")
        self.sockets = []

    def socket(self, **how):
        """Open a stranger's connection to the port."""
        self.sockets.append(ControlSocket(self.port.port, **how))
        return self.sockets[-1]

    def dialled(self):
        """Open another instance's control port, which dials this one."""
        self.sockets.append(Dialled("127.0.0.1", self.port.port))
        return self.sockets[-1]

    def answer(self, socket):
        """Return the next messages of the port without heartbeats and its own Hello."""
        while True:
            self.until(lambda: socket.poll(0))
            said = msgspec.msgpack.decode(socket.recv(), type=list[PeerMessage])
            if said := [message for message in said if not isinstance(message, Heartbeat | Hello)]:
                return said

    def close(self) -> None:
        for socket in self.sockets:
            socket.close()
        super().close()


@pytest.fixture
def port():
    port = Port()
    yield port
    port.close()


def hello(sender="D", metadata=b"of D, with its secret", link=1, *, invite=True, **changes):
    """Return the frame of a Hello, followed by the request to be given KV unless ``invite`` is False."""
    fields = {"version": PROTOCOL_VERSION, "fingerprint": "f", "layout": LAYOUT, "backend": "tcp", **changes}
    said = [Hello("P", sender, link, metadata=metadata, **fields), Invite("P", metadata)]
    return encode(said if invite else said[:1])


def connect(port, socket, sender="D", metadata=b"of D, with its secret", link=1):
    """Become a peer that KV can be given to; returns the link's number."""
    before = port.links(sender, metadata)
    socket.send(hello(sender, metadata, link))
    port.until(lambda: port.links(sender, metadata) != before)
    number = port.links(sender, metadata)[-1]
    port.peers.on_event(PeerConnected(sender, number), port.now)
    assert port.answer(socket) == [Welcome(sender)]
    return number


def epochs(port):
    return [peer["epoch"] for peer in port.peers.table.info()]


def test_layouts_may_differ_in_their_order_only(port):
    blocks = msgspec.structs.replace(LAYOUT, order="blocks")
    unlike, other = port.socket(), port.socket()
    unlike.send(hello("E", layout=msgspec.structs.replace(blocks, page_size=2 * LAYOUT.page_size)))
    [refused] = port.answer(unlike)
    assert isinstance(refused, Refused)
    assert "--page-size" in refused.reason
    labelled = msgspec.structs.replace(LAYOUT.groups[0], kind="sparse", label_dim=4, labels="abc")
    unlike = port.socket()
    unlike.send(hello("F", layout=msgspec.structs.replace(LAYOUT, groups=(labelled,))))
    [refused] = port.answer(unlike)
    assert isinstance(refused, Refused)
    assert "labels=abc" in refused.reason
    assert "one file of channels where there are any" in refused.reason
    other.send(hello("D", layout=blocks))
    port.until(lambda: port.links("D"))


def test_a_forged_hello_does_not_end_the_link_of_its_victim(port):
    honest, stranger = port.socket(), port.socket()
    connect(port, honest)
    stranger.send(hello(metadata=b"of the stranger"))
    (refused,) = port.answer(stranger)
    assert "another data port" in refused.reason
    honest.send(encode([RoomQueued("P", named(7))]))
    port.until(lambda: port.heard == [RoomQueued("P", named(7))])
    assert port.gone == []
    assert not [m for m in port.commands if isinstance(m, DisconnectPeer)]


def test_the_same_instance_may_connect_anew(port):
    first = connect(port, port.socket())
    again = port.socket()
    again.send(hello(link=2))
    port.until(lambda: port.gone == [("D", "it connected anew")])
    assert port.links("D") == [first]
    port.until(lambda: [p.writing for p in port.peers.table.by_connection.values()] == [Writing.WANTED])
    port.peers.on_event(PeerLinkDown("D", first), port.now)
    port.turn()
    second = port.links("D")[-1]
    assert second != first
    port.peers.on_event(PeerLinkDown("D", first), port.now)  # repeated, it does no harm
    port.peers.on_event(PeerConnected("D", first), port.now)
    port.peers.on_event(PeerConnected("D", second), port.now)
    assert port.answer(again) == [Welcome("D")]


def test_one_peer_too_many_is_refused_with_the_reason(port, monkeypatch):
    monkeypatch.setattr(peers_module, "MAX_PEERS", 2)
    for sender in ("a", "b"):
        connect(port, port.socket(), sender)
    third = port.socket()
    third.send(hello("c"))
    (refused,) = port.answer(third)
    assert "2 instances are connected" in refused.reason
    port.now += 2  # the others fall silent: there is room again
    port.turn()
    third.send(hello("c"))
    port.until(lambda: port.links("c"))


def harmless(port, stranger, data):
    """Assert that ``data`` causes one refusal, and nothing else."""
    honest = port.socket()
    connect(port, honest)
    sent_before = list(port.commands)
    stranger.send_bytes(data)
    port.until(lambda: port.peers.refused == 1)
    assert (port.heard, port.gone, port.commands) == ([], [], sent_before)
    assert epochs(port) == ["D"]


@pytest.mark.parametrize(
    "payload",
    [
        b"\x81\xa1\xff\x01",
        b"\x91\x82\xa4type\xa9Heartbeat\xa5epoch\xa3\xff\xfe\xfd",
        b"x" * 7,
        encode([Heartbeat("P"), Heartbeat("P")])[:-1],
        encode([Heartbeat("another life")]),
        encode([RoomQueued("P", named(1))]),
        hello(version=PROTOCOL_VERSION + 1, invite=False),
    ],
)
def test_what_strangers_send_is_refused_and_nothing_else_happens(port, payload):
    stranger = port.socket()
    harmless(port, stranger, framed(payload))
    assert not stranger.has_ended()  # a frame that means nothing is dropped, and no more


@pytest.mark.parametrize(
    "data",
    [
        framed(b""),
        LENGTH.pack((1 << 32) - 1) + bytes(100),
        LENGTH.pack(SHORT_FRAME_BYTES) + b"no Hello is as long as that",
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_a_frame_of_no_or_too_many_bytes_ends_its_connection(port, data):
    stranger = port.socket()
    harmless(port, stranger, data)
    wait_until(stranger.has_ended, LIMIT, "it was hung up on")


def test_a_frame_that_is_too_long_ends_its_connection_only(port):
    honest, stranger = port.socket(), port.socket()
    connect(port, honest)
    connect(port, stranger, "S")
    stranger.send_bytes(LENGTH.pack(SHORT_FRAME_BYTES + 1) + bytes(1000))
    port.until(stranger.has_ended)
    assert port.heard == []
    assert [epoch for epoch, _ in port.gone] == ["S"]
    honest.send(encode([RoomQueued("P", named(7))]))
    port.until(lambda: port.heard)


def test_connections_without_a_hello_cost_nothing_here(port):
    idle = [port.socket() for _ in range(50)]
    for socket in idle:
        socket.send(encode([Heartbeat("P")]))
    connect(port, port.socket())
    assert epochs(port) == ["D"]


def test_a_turn_reads_so_much_and_the_rest_wakes_the_loop_again(port):
    stranger = port.socket()
    connect(port, stranger)
    frame = encode([RoomQueued("P", named(1))] * FRAME_MESSAGES)
    frames = 3 * MESSAGES_A_TURN // FRAME_MESSAGES
    for _ in range(frames):
        stranger.send(frame)
    poller = zmq.Poller()
    poller.register(port.port.fileno(), zmq.POLLIN)
    turns = 0
    while len(port.heard) < frames * FRAME_MESSAGES:
        assert poller.poll(int(LIMIT * 1000))
        before = len(port.heard)
        port.turn()
        assert len(port.heard) - before <= MESSAGES_A_TURN
        turns += 1
    assert turns >= 3


def test_garbage_uses_up_a_turn_too(port, monkeypatch):
    monkeypatch.setattr(port_module, "MESSAGES_A_TURN", 10)
    stranger = port.socket()
    for _ in range(35):
        stranger.send(b"garbage")
    wait_until(port.readable, LIMIT, "the first has come")
    port.until(lambda: port.peers.refused == 35)
    before = port.peers.refused
    for _ in range(35):
        stranger.send(b"garbage")
    wait_until(port.readable, LIMIT, "the first has come")
    port.turn()
    assert port.peers.refused <= before + 10


def test_an_answer_too_long_for_a_frame_is_reported_to_its_owner(port, monkeypatch):
    honest = port.socket()
    connect(port, honest)
    (peer,) = port.peers.table.by_connection.values()
    port.port._peers[peer.connection].sends = 600
    long = FirstToken("D", named(7), 5, 0, Timing(), input_logprobs=[TokenLogprob(1, -1.0)] * 100)
    short = FirstToken("D", named(8), 5, 0, Timing())
    peer.send(long)
    peer.send(short)
    assert port.answer(honest) == [short]
    assert port.too_long == [("D", long)]


def test_a_peer_that_vanished_is_written_to_in_vain(port):
    stranger = port.socket()
    connect(port, stranger)
    (peer,) = port.peers.table.by_connection.values()
    stranger.close(linger=0)
    for _ in range(100):
        peer.send(Heartbeat("D"))
        port.turn()
    port.until(lambda: port.gone)
    port.port.send(-1, [Heartbeat("D")])
    connect(port, port.socket(), "S")
    assert ([epoch for epoch, _ in port.gone], epochs(port)[0]) == (["D"], "S")


def test_a_peer_that_is_gone_is_hung_up_on(port):
    silent = port.socket()
    connect(port, silent)
    port.now += 2
    port.turn()
    assert port.gone == [("D", "it was silent for 2.0 s")]
    wait_until(silent.has_ended, LIMIT, "it need not wait for its own timeout")


def test_a_peer_whose_connection_ends_is_gone_at_once(port):
    honest = port.socket()
    connect(port, honest)
    honest.close()
    port.until(lambda: port.gone)
    assert port.gone == [("D", "the peer closed the connection")]
    assert port.commands[-1] == DisconnectPeer("D", 1)


def arrived(port):
    """Return the next frame, without acting on it."""
    frames = []
    wait_until(lambda: frames.append(port.port.recv()) or frames[-1], LIMIT, "a frame has come")
    return frames[-1]


def heard(client):
    """Return the next frame at the dialling end. Raises ``UndeclaredMessage``."""
    frames = []
    wait_until(lambda: frames.append(client.recv()) or frames[-1] is not None, LIMIT, "the client has it")
    return frames[-1]


def over(client):
    """Return why the connection is over, once everything was read."""
    return client.recv() is None and client.ended


def test_who_dialled_writes_to_one_that_died_in_vain(port):
    client = port.dialled()
    client.send([Heartbeat("P")])
    identity, _ = arrived(port)
    wait_until(lambda: client.recv() or client.connection.greeted, LIMIT, "it is connected")
    port.port.drop(identity)
    wait_until(lambda: over(client), LIMIT, "the client notices")
    assert client.ended == "it closed the connection or died"
    for _ in range(10):
        client.send([Heartbeat("P")])


def test_who_dialled_takes_messages_of_one_frame(port):
    client = port.dialled()
    client.send([Heartbeat("P")])
    identity, _ = arrived(port)
    wait_until(lambda: client.recv() or client.connection.greeted, LIMIT, "it is connected")
    (connection,) = port.port._strangers.values()
    for payload in (b"two", b"\x91\xa3\xff\xfe\xfd"):
        connection.send([payload])
        with pytest.raises(UndeclaredMessage):
            heard(client)
    port.port.send(identity, [Heartbeat("D")])
    assert heard(client) == [Heartbeat("D")]
    assert client.recv() is None
    assert client.ended is None
    connection.send([b""])
    wait_until(lambda: over(client), LIMIT, "the client notices")
    assert "broke the protocol" in client.ended


def test_long_frames_are_taken_only_from_who_is_asked_for_kv(port):
    """An announced length costs nothing; what comes of it is kept until the frame is whole."""
    asked, other = port.dialled(), port.dialled()
    for client, sender in ((asked, "D"), (other, "E")):
        client.send([Hello("P", sender, 1, PROTOCOL_VERSION, "f", LAYOUT, "tcp", b"m")])
        port.until(lambda sender=sender, client=client: client.recv() or sender in epochs(port))
    peers = {peer.epoch: peer for peer in port.peers.table.by_connection.values()}
    port.peers.want(peers["D"], port.now)
    port.turn()
    port.work()
    port.until(lambda: peers["D"].reading is Reading.INVITED)
    limits = {epoch: port.port._peers[peer.connection].frame_limit for epoch, peer in peers.items()}
    assert limits["D"] > 10 * limits["E"] == 10 * SHORT_FRAME_BYTES
