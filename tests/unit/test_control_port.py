"""A prefill's control port, with real sockets and no scheduler: who becomes a peer, what a turn reads, what is kept."""

from __future__ import annotations

import select

import msgspec
import pytest
import zmq
from support.control_wire import ControlSocket, framed
from support.processes import wait_until

from pdserve.disaggregation import decode_peers
from pdserve.disaggregation.control import server as control_server
from pdserve.disaggregation.control.client import ControlClient
from pdserve.disaggregation.control.frames import FRAME_MESSAGES, LENGTH, MESSAGES_A_TURN, TO_PREFILL_BYTES
from pdserve.disaggregation.control.server import ControlServer
from pdserve.disaggregation.decode_peers import DecodePeers
from pdserve.disaggregation.prefill_link import LinkState, PrefillLink
from pdserve.disaggregation.prefill_links import PrefillLinks
from pdserve.disaggregation.wire.reactor import Reactor
from pdserve.messages.channel import encode
from pdserve.messages.decode import UndeclaredMessage
from pdserve.messages.handover import (
    PROTOCOL_VERSION,
    AuxData,
    Heartbeat,
    Hello,
    Refused,
    RoomQueued,
    TransferDone,
    TransferFailed,
    Welcome,
)
from pdserve.messages.outputs import Timing
from pdserve.messages.worker import ConnectPeer, DisconnectPeer, KVLayout, PeerConnected, WorkerReady

LAYOUT = KVLayout(page_size=16, num_layers=2, kv_heads=1, head_dim=8, dtype="float32", page_bytes=4096)
WORKER = WorkerReady("f", 100, 2048, 4096, LAYOUT, "cpu", "cpu", "float32", b"mine", {})
LIMIT = 10.0


class Host:
    """What the hand-over sees of a scheduler: an epoch, and a worker that is told things."""

    epoch = "P"

    def __init__(self) -> None:
        self.told = []

    def to_worker(self, message) -> None:
        self.told.append(message)


class Port:
    """A control port with its peers; ``clients`` connect to it."""

    def __init__(self) -> None:
        self.server = ControlServer("127.0.0.1")
        self.reactor = Reactor()
        self.host = Host()
        self.heard = []
        self.gone = []
        self.now = 100.0
        self.peers = DecodePeers(
            self.host,
            WORKER,
            "tcp",
            (0.3, 1.5),
            self.server,
            lambda peer, message, now: self.heard.append(message),
            lambda peer, reason: self.gone.append((peer.epoch, reason)),
        )
        self.sockets = []

    def socket(self, **how):
        """A stranger's."""
        self.sockets.append(ControlSocket(self.server.port, **how))
        return self.sockets[-1]

    def client(self):
        """A decode's."""
        client = ControlClient(self.reactor, "127.0.0.1", self.server.port)
        self.sockets.append(client)
        return client

    def readable(self):
        """Whether the loop would wake for it."""
        return bool(select.select([self.server], [], [], 0)[0])

    def turn(self) -> None:
        self.peers.poll(self.now)
        self.peers.flush()

    def until(self, condition) -> None:
        def turned():
            self.turn()
            return condition()

        wait_until(turned, LIMIT, "the port has heard it")

    def answer(self, socket):
        """What the port says next, heartbeats apart."""
        declared = list[Welcome | Refused | Heartbeat | TransferFailed]
        while True:
            self.until(lambda: socket.poll(0))
            said = msgspec.msgpack.decode(socket.recv(), type=declared)
            if said := [message for message in said if not isinstance(message, Heartbeat)]:
                return said

    def close(self) -> None:
        for socket in (*self.sockets, self.server):
            socket.close()
        self.reactor.close()


@pytest.fixture
def port():
    port = Port()
    yield port
    port.close()


def hello(sender="D", metadata=b"of D, with its secret", **changes):
    fields = {"version": PROTOCOL_VERSION, "fingerprint": "f", "layout": LAYOUT, "backend": "tcp", **changes}
    return encode([Hello("P", sender, metadata=metadata, **fields)])


def connect(port, socket, sender="D", metadata=b"of D, with its secret"):
    """Become a peer."""
    socket.send(hello(sender, metadata))
    port.until(lambda: ConnectPeer(sender, metadata) in port.host.told)
    port.peers.on_peer_connected(PeerConnected(sender))
    assert port.answer(socket) == [Welcome(sender)]


def test_layouts_may_differ_in_their_order_only(port):
    blocks = msgspec.structs.replace(LAYOUT, order="blocks")
    unlike, other = port.socket(), port.socket()
    unlike.send(hello("E", layout=msgspec.structs.replace(blocks, page_size=2 * LAYOUT.page_size)))
    [refused] = port.answer(unlike)
    assert isinstance(refused, Refused)
    assert "--page-size" in refused.reason
    other.send(hello("D", layout=blocks))
    port.until(lambda: ConnectPeer("D", b"of D, with its secret") in port.host.told)


def test_a_forged_hello_does_not_end_the_link_of_its_victim(port):
    honest, stranger = port.socket(), port.socket()
    connect(port, honest)
    stranger.send(hello(metadata=b"of the stranger"))
    (refused,) = port.answer(stranger)
    assert "another data port" in refused.reason
    honest.send(encode([RoomQueued("P", 7)]))
    port.until(lambda: port.heard == [RoomQueued("P", 7)])
    assert port.gone == []
    assert not [m for m in port.host.told if isinstance(m, DisconnectPeer)]


def test_the_same_instance_may_connect_anew(port):
    connect(port, port.socket())
    again = port.socket()
    again.send(hello())
    port.until(lambda: port.gone == [("D", "the decode instance connected anew")])
    port.peers.on_peer_link_down("D")
    port.peers.on_peer_connected(PeerConnected("D"))
    assert port.answer(again) == [Welcome("D")]


def test_one_peer_too_many_is_refused_with_the_reason(port, monkeypatch):
    monkeypatch.setattr(decode_peers, "MAX_PEERS", 2)
    for sender in ("a", "b"):
        connect(port, port.socket(), sender)
    third = port.socket()
    third.send(hello("c"))
    (refused,) = port.answer(third)
    assert "2 decode instances are connected" in refused.reason
    port.now += 2  # the others fall silent: there is room again
    port.turn()
    third.send(hello("c"))
    port.until(lambda: ConnectPeer("c", b"of D, with its secret") in port.host.told)


def harmless(port, stranger, data):
    """One refusal, and nothing else, comes of ``data``."""
    honest = port.socket()
    connect(port, honest)
    told = list(port.host.told)
    stranger.send_bytes(data)
    port.until(lambda: port.peers.refused == 1)
    assert (port.heard, port.gone, port.host.told) == ([], [], told)
    assert [peer["epoch"] for peer in port.peers.info()] == ["D"]


@pytest.mark.parametrize(
    "payload",
    [
        b"\x81\xa1\xff\x01",
        b"\x91\x82\xa4type\xa9Heartbeat\xa5epoch\xa3\xff\xfe\xfd",
        b"x" * 7,
        encode([Heartbeat("P"), Heartbeat("P")])[:-1],
        encode([Heartbeat("another life")]),
        encode([RoomQueued("P", 1)]),
        hello(version=PROTOCOL_VERSION + 1),
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
        LENGTH.pack(TO_PREFILL_BYTES) + b"no Hello is as long as that",
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
    stranger.send_bytes(LENGTH.pack(TO_PREFILL_BYTES + 1) + bytes(1000))
    port.until(stranger.has_ended)
    assert port.heard == []
    assert [epoch for epoch, _ in port.gone] == ["S"]
    honest.send(encode([RoomQueued("P", 7)]))
    port.until(lambda: port.heard)


def test_connections_without_a_hello_cost_nothing_here(port):
    idle = [port.socket() for _ in range(50)]
    for socket in idle:
        socket.send(encode([Heartbeat("P")]))
    connect(port, port.socket())
    assert len(port.peers._peers) == 1
    assert port.peers._closing == set()


def test_a_turn_reads_so_much_and_the_rest_wakes_the_loop_again(port):
    stranger = port.socket()
    connect(port, stranger)
    frame = encode([RoomQueued("P", 1)] * FRAME_MESSAGES)
    frames = 3 * MESSAGES_A_TURN // FRAME_MESSAGES
    for _ in range(frames):
        stranger.send(frame)
    poller = zmq.Poller()
    poller.register(port.server.fileno(), zmq.POLLIN)
    turns = 0
    while len(port.heard) < frames * FRAME_MESSAGES:
        assert poller.poll(int(LIMIT * 1000))
        before = len(port.heard)
        port.turn()
        assert len(port.heard) - before <= MESSAGES_A_TURN
        turns += 1
    assert turns >= 3


def test_garbage_uses_up_a_turn_too(port, monkeypatch):
    monkeypatch.setattr(decode_peers, "MESSAGES_A_TURN", 10)
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


def test_an_answer_too_long_for_a_frame_fails_its_room_only(port, monkeypatch):
    honest = port.socket()
    connect(port, honest)
    (peer,) = port.peers._peers.values()
    monkeypatch.setattr(control_server, "TO_DECODE_BYTES", 200)
    port.peers.send(peer, TransferDone("D", 7, 1, AuxData(1, 0, Timing())))
    (failed,) = port.answer(honest)
    assert (failed.room, failed.status) == (7, 400)
    assert "top_logprobs" in failed.reason


def test_a_peer_that_vanished_is_written_to_in_vain(port):
    stranger = port.socket()
    connect(port, stranger)
    (peer,) = port.peers._peers.values()
    stranger.close(linger=0)
    for _ in range(100):
        port.peers.send(peer, Heartbeat("D"))
        port.turn()
    port.server.send(-1, [Heartbeat("D")])


def test_a_peer_that_is_gone_is_hung_up_on(port):
    silent = port.socket()
    connect(port, silent)
    port.now += 2
    port.turn()
    assert port.gone == [("D", "the decode instance was silent for 1.5 s")]
    wait_until(silent.has_ended, LIMIT, "it need not wait for its own timeout")


def test_a_peer_whose_connection_ends_is_gone_at_once(port):
    honest = port.socket()
    connect(port, honest)
    honest.close()
    port.until(lambda: port.gone)
    assert port.gone == [("D", "its control connection ended: the peer closed the connection")]
    assert port.host.told[-1] == DisconnectPeer("D")


def arrived(port):
    """The next frame, without anybody acting on it."""
    frames = []
    wait_until(lambda: frames.append(port.server.recv()) or frames[-1], LIMIT, "a frame has come")
    return frames[-1]


def heard(client):
    """The next frame that a decode gets; raises ``UndeclaredMessage``."""
    frames = []
    wait_until(lambda: frames.append(client.recv()) or frames[-1] is not None, LIMIT, "the client has it")
    return frames[-1]


def ended(client):
    """Why the connection is over, once everything was read."""
    return client.recv() is None and client.connection_ended()


def test_a_decode_writes_to_a_prefill_that_died_in_vain(port):
    client = port.client()
    client.send([Heartbeat("P")])
    identity, _ = arrived(port)
    port.server.drop(identity)
    wait_until(lambda: ended(client), LIMIT, "the client notices")
    assert client.connection_ended() == "the prefill instance closed the connection or died"
    for _ in range(10):
        client.send([Heartbeat("P")])
    assert not select.select([port.reactor], [], [], 0)[0]  # its owner can sleep


def test_a_decode_takes_messages_of_one_frame(port):
    client = port.client()
    client.send([Heartbeat("P")])
    identity, _ = arrived(port)
    (connection,) = port.server._strangers.values()
    for payload in (b"two", b"\x91\xa3\xff\xfe\xfd"):
        connection.send([payload])
        with pytest.raises(UndeclaredMessage):
            heard(client)
    port.server.send(identity, [Heartbeat("D")])
    assert heard(client) == [Heartbeat("D")]
    assert client.recv() is None
    assert client.connection_ended() is None
    connection.send([b""])
    wait_until(lambda: ended(client), LIMIT, "the client notices")
    assert "broke the protocol" in client.connection_ended()


class Reader:
    """A decode's links, with a client that says what it is told to."""

    def __init__(self) -> None:
        self.heard = []
        self.gone = []
        self.links = PrefillLinks(
            Host(),
            WORKER,
            "tcp",
            (0.3, 1.5),
            None,
            lambda host, port: None,
            lambda link, message: self.heard.append(message),
            self.gone.append,
            lambda link: None,
        )
        self.link = PrefillLink("p", 1, LinkState.GREETING, peer_epoch="prefill")
        self.frames = []

    def recv(self):
        frame = self.frames.pop(0) if self.frames else None
        if frame == b"garbage":
            raise UndeclaredMessage("dropped a frame")
        return frame

    def read(self) -> None:
        self.links._read(self.link, self, 1.0)


def test_a_turn_of_a_decode_reads_so_much_too():
    reader = Reader()
    failed = TransferFailed("P", 1, 503, "why")
    reader.frames = [[failed] * FRAME_MESSAGES, b"garbage", [], *[[failed] * FRAME_MESSAGES] * 4]
    reader.read()
    assert len(reader.heard) <= MESSAGES_A_TURN + FRAME_MESSAGES
    assert reader.frames
    reader.read()
    reader.read()
    assert len(reader.heard) == 5 * FRAME_MESSAGES
    assert reader.links.refused == 1
    reader.frames = [b"garbage"] * (MESSAGES_A_TURN + 5)
    reader.read()
    assert len(reader.frames) == 5


def test_a_prefill_is_not_linked_before_it_was_greeted():
    reader = Reader()
    reader.frames = [[Welcome("P")]]
    reader.read()
    assert reader.link.state is LinkState.GREETING
    reader.link.greeted = True
    reader.frames = [[Welcome("P")]]
    reader.read()
    assert reader.link.state is LinkState.READY
